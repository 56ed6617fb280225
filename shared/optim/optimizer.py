"""Chapter 05. An optimizer with an update rule for each parameter group: AdamW, Lion, Muon or SGD.

Muon needs a second rule for parameters that are not matrices. Two optimizers would have to be stepped, saved, loaded and scheduled
together; one optimizer with a rule in each group is a `torch.optim.Optimizer` like any other, with its usual `state_dict`. SGD with
momentum (gradient descent), the baseline of the others, stands here:

    b = momentum b + g;  w = w - lr weight_decay w - lr b        (Sutskever et al. 2013, section 2, in torch's convention)

Left out on purpose: the dozens of hooks and switches (`maximize`, `capturable`) of PyTorch's own optimizers; dampening and Nesterov's
variant of SGD.
"""

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shared.optim.adamw import adamw_step
from shared.optim.lion import lion_step
from shared.optim.muon import muon_step


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


RULES: dict[str, Callable[[dict[str, Any], dict], None]] = {
    "adamw": adamw_step,
    "lion": lion_step,
    "muon": muon_step,
    "sgd": sgd_step,
}


class GroupedOptimizer(Optimizer):
    """Updates each parameter group by its own rule.

    `lr` is a group's current learning rate, and `base_lr` the one that schedules multiply; it is `lr` where a group does not set it.

    Args:
        groups: dictionaries with `params`, `rule` (a name in RULES), `lr`, and the options that the rule's step function reads.
    """

    # What PyTorch's decorator wraps: the decorator imports its compiler, which takes as long as torch itself, to keep it out of these.
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)

    def __init__(self, groups: Iterable[dict[str, Any]]):
        super().__init__(groups, defaults={})

    def add_param_group(self, group: dict[str, Any]) -> None:
        if group.get("rule") not in RULES:
            raise ValueError(f"A parameter group has the rule {group.get('rule')!r}: choose {', '.join(RULES)}.")
        group.setdefault("base_lr", group["lr"])
        unwrap(Optimizer.add_param_group)(self, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all groups once. `closure`, where given, computes the gradients, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            RULES[group["rule"]](group, self.state)
        return loss
