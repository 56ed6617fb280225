"""Solutions of chapter 05. Each body with the reason why it is written this way."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shared.optim.loss_scale import LossScale


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Each running mean is one or two passes over memory, in place. The bias correction of the mean goes into the scalar in front, that of
    the squares before the root, so eps is added to the corrected root: at the first step the gradients' size cancels."""
    beta1, beta2 = betas
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    typical = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    parameter.mul_(1 - lr * weight_decay)
    parameter.addcdiv_(exp_avg, typical, value=-lr / (1 - beta1**step))


def lion_update(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """The direction is a mix of its own, made before the memory is updated: it weighs the new gradient by 1 - beta1, ten times as
    much as the memory will."""
    beta1, beta2 = betas
    direction = exp_avg.lerp(gradient, 1 - beta1).sign_()
    exp_avg.lerp_(gradient, 1 - beta2)
    parameter.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)


def newton_schulz(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7
) -> Tensor:
    """baddbmm adds what a product is added to within the product: X is read and written once where three operations would each make
    a new tensor. It wants exactly one leading dimension."""
    a, b, c = coefficients
    x = matrices.reshape(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def muon_update(
    gradient: Tensor,
    momentum_buffer: Tensor,
    orthogonalize: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    momentum: float,
    nesterov: bool,
    scaling: str,
) -> Tensor:
    """Momentum is elementwise, so it may run on a part of a matrix. What follows is not: the scale comes from the whole shape."""
    momentum_buffer.lerp_(gradient, 1 - momentum)
    direction = gradient.lerp(momentum_buffer, momentum) if nesterov else momentum_buffer
    rows, columns = shape[-2:]
    scale = max(1, rows / columns) ** 0.5 if scaling == "original" else 0.2 * max(rows, columns) ** 0.5
    return orthogonalize(direction) * scale


def learning_rate_factor(step: int, name: str, warmup_steps: int, steps: int, decay_steps: int, minimum: float) -> float:
    """Warm-up and decay are two ramps with ends of their own, and what is between them is 1. The decay's ramp has decay_steps + 1 parts,
    so that its last one, the minimum itself, falls behind the last step."""
    if step < warmup_steps:
        return step / warmup_steps
    if name == "constant":
        return 1.0
    falling = decay_steps if name == "wsd" else steps - warmup_steps
    done = min(max((step - (steps - falling)) / (falling + 1), 0.0), 1.0)
    left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "wsd": 1 - math.sqrt(done)}[name]
    return minimum + (1 - minimum) * left


def update_scale(state: LossScale, finite: bool, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
    """Any overflow starts the count anew: the scale grows only after `interval` good steps in a row."""
    if not finite:
        return LossScale(state.scale * backoff, 0)
    if state.good_steps + 1 >= interval:
        return LossScale(state.scale * growth, 0)
    return LossScale(state.scale, state.good_steps + 1)
