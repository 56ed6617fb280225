"""Chapter 05. SGD with momentum (gradient descent): the baseline of the other optimizers.

    b = momentum b + g;  w = w - lr weight_decay w - lr b        (Sutskever et al. 2013, section 2, in torch's convention)

The weight decay is decoupled, as in all of this chapter's optimizers. Left out on purpose: dampening and Nesterov's variant.
"""

from typing import Any

import torch
from torch import Tensor


def sgd_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """One step of SGD for a parameter group; parameters without a gradient are skipped.

    Args:
        group: params, lr, momentum, weight_decay.
        state: parameter -> momentum_buffer, like the parameter.
    """
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        if not state[parameter]:
            state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer = state[parameter]["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(buffer, alpha=-group["lr"])
