"""Chapter 05. The AdamW optimizer: every weight moves by the mean of its gradients over their typical size.

Kingma and Ba 2015, algorithm 1, with the weight decay taken out of the gradient (Loshchilov and Hutter 2019, algorithm 2):
decay shrinks the weight itself, so it is not divided by the gradient's size.

Left out on purpose: AMSGrad, and the L2 penalty inside the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from shared.course.binding import exercise


@exercise("05.adamw_update")
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


def adamw_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """One step of AdamW for a parameter group; parameters without a gradient are skipped.

    With `fused: True` in the group, PyTorch's fused kernel computes the same step for all of them. It passes over memory once, where
    separate operations pass over it a dozen times.

    Args:
        group: params, lr, betas, eps, weight_decay, fused.
        state: parameter -> step ([] float32), exp_avg and exp_avg_sq (like the parameter).
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in parameters:
        if not state[parameter]:
            # The fused kernel reads the step count on its own device; the other path reads it on the CPU, without a device synchronization.
            device = parameter.device if group["fused"] else "cpu"
            state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state[parameter]["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state[parameter]["step"] += 1
    settings = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    if group["fused"]:
        fused_step(parameters, [state[parameter] for parameter in parameters], group["betas"], settings)
        return
    for parameter in parameters:
        moments = state[parameter]
        adamw_update(
            parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"], int(moments["step"].item()),
            betas=tuple(group["betas"]), **settings,
        )  # fmt: skip


def fused_step(
    parameters: list[Tensor], states: list[dict[str, Tensor]], betas: tuple[float, float], settings: dict[str, float]
) -> None:
    """Fused AdamW: the same step by PyTorch's kernel, which takes one device and dtype at a time."""
    kinds: dict[tuple, list[int]] = {}
    for index, parameter in enumerate(parameters):
        kinds.setdefault((parameter.device, parameter.dtype), []).append(index)
    for indices in kinds.values():
        columns = ([states[index][key] for index in indices] for key in ("exp_avg", "exp_avg_sq"))
        torch._fused_adamw_(
            [parameters[index] for index in indices], [parameters[index].grad for index in indices], *columns, [],
            [states[index]["step"] for index in indices],
            beta1=betas[0], beta2=betas[1], amsgrad=False, maximize=False, **settings,
        )  # fmt: skip
