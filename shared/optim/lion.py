"""Chapter 05. The Lion optimizer: the sign of the averaged gradient, so that every weight moves by exactly the learning rate.

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2. It keeps one running mean where AdamW keeps two. Since
every weight moves by the same amount, its learning rate is 3 to 10 times smaller than AdamW's, and its weight decay as much larger.

Left out on purpose: a step that shrinks where signs disagree (cautious variants).
"""

from typing import Any

import torch
from torch import Tensor

from shared.course.binding import exercise


@exercise("05.lion_update")
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


def lion_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """One step of Lion for a parameter group; parameters without a gradient are skipped.

    Args:
        group: params, lr, betas, weight_decay.
        state: parameter -> exp_avg, like the parameter.
    """
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        if not state[parameter]:
            state[parameter]["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        lion_update(parameter, parameter.grad, state[parameter]["exp_avg"], group["lr"], tuple(group["betas"]), group["weight_decay"])
