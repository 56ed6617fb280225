"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import math

import torch

from shared.optim.loss_scale import LossScale


def adamw_update__as_the_paper_reads(parameter, gradient, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    beta1, beta2 = betas
    exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * gradient)
    exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * gradient**2)
    mean, square = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
    parameter.sub_(lr * (mean / (square.sqrt() + eps) + weight_decay * parameter))


def adamw_update__corrections_in_scalars(parameter, gradient, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    parameter *= 1 - lr * weight_decay
    exp_avg += (gradient - exp_avg) * (1 - betas[0])
    exp_avg_sq += (gradient.square() - exp_avg_sq) * (1 - betas[1])
    root = exp_avg_sq.sqrt() / math.sqrt(1 - betas[1] ** step)
    parameter -= lr / (1 - betas[0] ** step) * exp_avg / (root + eps)


def lion_update__as_the_paper_reads(parameter, gradient, exp_avg, lr, betas, weight_decay):
    mix = betas[0] * exp_avg + (1 - betas[0]) * gradient
    parameter.sub_(lr * (torch.sign(mix) + weight_decay * parameter))
    exp_avg.mul_(betas[1]).add_(gradient, alpha=1 - betas[1])


def lion_update__where(parameter, gradient, exp_avg, lr, betas, weight_decay):
    mix = torch.lerp(gradient, exp_avg, betas[0])
    parameter -= lr * weight_decay * parameter
    parameter -= lr * ((mix > 0).to(mix.dtype) - (mix < 0).to(mix.dtype))
    exp_avg.copy_(torch.lerp(gradient, exp_avg, betas[1]))


def newton_schulz__as_the_formula_reads(matrices, steps=5, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7):
    a, b, c = coefficients
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    x = x / x.square().sum(dim=(-2, -1), keepdim=True).sqrt().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


def newton_schulz__horner_on_columns(matrices, steps=5, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7):
    """The smaller product is X^T X for tall matrices, and the polynomial stands on the right."""
    a, b, c = coefficients
    x = matrices / torch.maximum(torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True), torch.tensor(eps, dtype=matrices.dtype))
    tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT
        eye = torch.eye(gram.shape[-1], dtype=x.dtype)
        polynomial = a * eye + gram @ (b * eye + c * gram)
        x = x @ polynomial if tall else polynomial @ x
    return x


def muon_update__as_the_formula_reads(gradient, momentum_buffer, orthogonalize, shape, momentum, nesterov, scaling):
    momentum_buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
    direction = momentum_buffer
    if nesterov:
        direction = momentum * momentum_buffer + (1 - momentum) * gradient
    update = orthogonalize(direction)
    if scaling == "original":
        return update * math.sqrt(max(1, shape[-2] / shape[-1]))
    return update * (0.2 * math.sqrt(max(shape[-2], shape[-1])))


def muon_update__scale_by_cases(gradient, momentum_buffer, orthogonalize, shape, momentum, nesterov, scaling):
    momentum_buffer += (gradient - momentum_buffer) * (1 - momentum)
    mixed = (gradient + (momentum_buffer - gradient) * momentum) if nesterov else momentum_buffer.clone()
    *_, rows, columns = shape
    if scaling == "match_rms_adamw":
        scale = math.sqrt(0.04 * max(rows, columns))
    elif rows > columns:
        scale = math.sqrt(rows / columns)
    else:
        scale = 1.0
    return scale * orthogonalize(mixed)


def learning_rate_factor__case_by_case(step, name, warmup_steps, steps, decay_steps, minimum):
    if step <= warmup_steps:
        return step / warmup_steps
    if name == "constant":
        return 1.0
    if step > steps:
        return minimum
    if name == "wsd":
        place = step - (steps - decay_steps)
        return 1.0 if place <= 0 else minimum + (1 - minimum) * (1 - (place / (decay_steps + 1)) ** 0.5)
    left = (steps + 1 - step) / (steps + 1 - warmup_steps)
    if name == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    return minimum * (1 - left) + left


def learning_rate_factor__interpolated(step, name, warmup_steps, steps, decay_steps, minimum):
    import numpy

    start = steps - decay_steps if name == "wsd" else warmup_steps
    if name == "constant" or step <= start:
        return float(min(1.0, step / max(warmup_steps, 1)))
    done = float(numpy.interp(step, [start, steps + 1], [0.0, 1.0]))
    curve = {"linear": lambda p: 1 - p, "cosine": lambda p: 0.5 + 0.5 * math.cos(p * math.pi), "wsd": lambda p: 1 - p**0.5}[name]
    return minimum + curve(done) - minimum * curve(done)


def update_scale__count_first(state, finite, growth=2.0, backoff=0.5, interval=2000):
    good = state.good_steps + 1 if finite else 0
    scale = state.scale if finite else state.scale * backoff
    return LossScale(scale * growth, 0) if good >= interval else LossScale(scale, good)


def update_scale__replaced(state, finite, growth=2.0, backoff=0.5, interval=2000):
    if finite and state.good_steps < interval - 1:
        return state._replace(good_steps=state.good_steps + 1)
    return state._replace(scale=state.scale * (growth if finite else backoff), good_steps=0)
