"""What the checks of chapter 12 share: random numbers, observing a result with its gradients, refusals, and what a call leaves behind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def left_behind(function: Callable, **given: Any) -> dict[str, Any]:
    """Which of torch's settings are others than before any call, whether one drew random numbers, and which arguments ask for other
    gradients."""

    def settings() -> dict[str, Any]:
        asks = {name: value.requires_grad for name, value in given.items() if isinstance(value, Tensor)}
        return asks | {"random numbers": torch.default_generator.get_state().tolist()}

    torch.rand(1)
    before = settings()
    function(**given)
    changed = [name for name, value in settings().items() if value != before[name]]
    fixed = {"default dtype": torch.get_default_dtype() == torch.float32, "gradients": torch.is_grad_enabled()}
    return {"changed by the call": changed + [name for name, kept in fixed.items() if not kept]}


def nothing(**_: Any) -> dict[str, Any]:
    return {"changed by the call": []}
