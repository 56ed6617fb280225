"""Your part of chapter 05. Write each body in place of its `raise` line, in any order.

    course check 05          checks what you wrote
    course hint 05.adamw_update    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shared.optim.loss_scale import LossScale


# AdamW (25 min, difficulty 3 of 5)
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
    """One step of AdamW for one tensor, in place (Loshchilov and Hutter 2019, algorithm 2, with torch's convention for decay).

        m = beta1 m + (1 - beta1) g                        the running mean of gradients
        v = beta2 v + (1 - beta2) g^2                      the running mean of their squares
        w = w - lr weight_decay w                          of the weight as it was before the step
        w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        parameter: w, any shape and floating dtype. Changed in place, like the two running means.
        gradient: g, in the shape of w. Left as it is.
        exp_avg: m, in the shape of w; zeros before the first step.
        exp_avg_sq: v, likewise.
        step: t, the number of this step, from 1.
        lr: the learning rate; also the decay's.
        betas: (beta1, beta2), each in [0, 1).
        eps: keeps the quotient finite where all gradients were 0.
        weight_decay: the part of w that lr takes away at each step.

    Where step is 1, a gradient of any size moves the weight by lr against the gradient's sign.

    >>> w, m, v = torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)
    >>> adamw_update(w, torch.tensor([4.0]), m, v, 1, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.5)
    >>> w, m, v                                                    # 2 - 0.1 * 0.5 * 2 - 0.1
    (tensor([1.8000]), tensor([0.4000]), tensor([0.1600]))
    """
    raise NotImplementedError("05.adamw_update: write this body")


# Lion (10 min, difficulty 2 of 5)
def lion_update(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """One step of Lion for one tensor, in place (Chen et al. 2023, algorithm 2).

        c = beta1 m + (1 - beta1) g                        what decides the direction of this step
        w = w - lr (sign(c) + weight_decay w)              with the weight as it was before the step
        m = beta2 m + (1 - beta2) g                        what is remembered

    Args:
        parameter: w, any shape and floating dtype. Changed in place, like the running mean.
        gradient: g, in the shape of w. Left as it is.
        exp_avg: m, in the shape of w; zeros before the first step.
        lr: the learning rate; also the decay's.
        betas: (beta1, beta2), each in [0, 1).
        weight_decay: the part of w that lr takes away at each step.

    Where c is 0 the sign is 0, and only the decay moves the weight. A gradient that is NaN is not hidden: m is NaN from then on. c is NaN
    then too, and counts as 0: the sign of what is no number is 0.

    >>> w, m = torch.tensor([2.0]), torch.tensor([-1.0])
    >>> lion_update(w, torch.tensor([4.0]), m, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    >>> w, m                                                       # c = -0.9 + 0.4, so 2 + 0.1 - 0.1 * 0.5 * 2
    (tensor([2.]), tensor([-0.9500]))
    """
    raise NotImplementedError("05.lion_update: write this body")


# Newton-Schulz (25 min, difficulty 4 of 5)
def newton_schulz(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7
) -> Tensor:
    """The matrices with their singular values pushed towards 1 (Jordan et al. 2024, "Muon", section "Newton-Schulz").

        X = G / max(||G||, eps);   then, `steps` times,   X = a X + (b A + c A A) X   with   A = X X^T

    ||G|| is the Frobenius norm, the root of the sum of all squares of one matrix: no singular value is larger.

    Args:
        matrices: [..., rows, columns], any floating dtype, which the computation keeps. Left unchanged. Leading dimensions count
            matrices that have nothing to do with each other, such as experts: where one holds NaN or infinity, it alone comes back as NaN.
        steps: how often the polynomial is applied.
        coefficients: (a, b, c).
        eps: the smallest norm to divide by, so that a matrix of zeros stays one.

    Returns:
        [..., rows, columns]. The product X X^T has the smaller of the two sides: a matrix with more rows than columns is
        transposed before, and back afterwards.

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])            # of norm 5: s = 0.6 and 0.8, and s + s^3 of each is
    >>> newton_schulz(matrix, steps=1, coefficients=(1.0, 1.0, 0.0))
    tensor([[0.8160, 0.0000],
            [0.0000, 1.3120]])
    """
    raise NotImplementedError("05.newton_schulz: write this body")


# Muon's update (20 min, difficulty 3 of 5)
def muon_update(
    gradient: Tensor,
    momentum_buffer: Tensor,
    orthogonalize: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    momentum: float,
    nesterov: bool,
    scaling: str,
) -> Tensor:
    """What Muon subtracts from a matrix, before the learning rate (Jordan et al. 2024).

        b = momentum b + (1 - momentum) g
        d = momentum b + (1 - momentum) g   with nesterov, which looks one step ahead;    d = b   without
        update = orthogonalize(d) * scale

    scale for a matrix with `rows` outputs and `columns` inputs:
        original: sqrt(max(1, rows / columns)).
        match_rms_adamw: 0.2 sqrt(max(rows, columns)), which gives the update AdamW's typical size, so that both can share a
            learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).

    Args:
        gradient: g, [..., rows, columns]; or a process's part of it, of any shape. Left unchanged.
        momentum_buffer: b, in the shape of the gradient; zeros before the first step. Changed in place.
        orthogonalize: maps a direction to the orthogonalised one, in the same shape. Called once: from a part it first
            gathers the whole.
        shape: (..., rows, columns) of the whole parameter, which the scale is read from.
        momentum: in [0, 1).
        nesterov: see above.
        scaling: see above.

    Returns:
        The update, in the shape of the gradient, in memory of its own: the buffer's is not the caller's to change.

    >>> b = torch.zeros(4, 1)                                      # b = 1, d = 0.9 * 1 + 0.1 * 10, times sqrt(4)
    >>> muon_update(torch.full((4, 1), 10.0), b, lambda d: d, (4, 1), momentum=0.9, nesterov=True, scaling="original").T
    tensor([[3.8000, 3.8000, 3.8000, 3.8000]])
    >>> b.T
    tensor([[1., 1., 1., 1.]])
    """
    raise NotImplementedError("05.muon_update: write this body")


# Learning-rate schedules (20 min, difficulty 2 of 5)
def learning_rate_factor(step: int, name: str, warmup_steps: int, steps: int, decay_steps: int, minimum: float) -> float:
    """What a step's learning rate is multiplied by.

    Warm-up: factor step / warmup_steps until it is 1 at step `warmup_steps`. Without warm-up steps there is none.
    Afterwards:
        constant: 1, forever.
        linear, cosine: a decay over all steps that are left.
        wsd (warm-up, stable, decay): 1 until the last `decay_steps` steps, and a decay over those.
    A decay over n steps ends at `minimum` in the step after the last, so that even with minimum 0 every step trains. In its i-th step the
    part p = i / (n + 1) of the way is done, and the factor is minimum + (1 - minimum) * left, with
        left = 1 - p (linear),  (1 + cos(pi p)) / 2 (cosine; Loshchilov and Hutter 2017, equation 5),
        1 - sqrt(p) (wsd; Hägele et al. 2024, equation 1).
    Steps behind the last one stay at the minimum.

    Args:
        step: the number of the step, from 1.
        name: see above.
        warmup_steps: 0 or more.
        steps: of the whole run, which warm-up and decay fit into.
        decay_steps: of wsd; the others do not read it.
        minimum: the factor that a decay ends at; constant does not read it.

    >>> [learning_rate_factor(step, "linear", 2, 5, 0, 0.0) for step in range(1, 8)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    >>> [learning_rate_factor(step, "wsd", 2, 8, 3, 0.0) for step in range(1, 10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.2928932188134524, 0.1339745962155614, 0.0]
    """
    raise NotImplementedError("05.learning_rate_factor: write this body")


# Dynamic loss scale (10 min, difficulty 2 of 5)
def update_scale(state: LossScale, finite: bool, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
    """The loss scale of the next step (Micikevicius et al. 2018, section 3.2).

    After a step whose gradients were not all finite: the scale times `backoff`, and the count restarts at 0.
    After a good step: the count is one higher; where it reaches `interval`, or is above it already (a run
    may be resumed with a shorter interval), the scale times `growth`, and the count restarts at 0.

    Args:
        state: of the step that was tried.
        finite: whether all its gradients were finite.
        growth: above 1. backoff: between 0 and 1.
        interval: good steps in a row after which a larger scale is tried.

    Returns:
        A new state; the old one is left as it is.

    >>> update_scale(LossScale(8.0, 1), finite=True, interval=2)
    LossScale(scale=16.0, good_steps=0)
    """
    raise NotImplementedError("05.update_scale: write this body")
