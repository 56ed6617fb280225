"""Chapter 05. The updater of a real run: one division, clipping, and no step where the gradients overflowed.

Chapter 01's updater divides by the token count and steps. This one divides by the token count and by the loss scale and clips, all in one
multiplication, so it goes over the gradients once to measure and once to scale.

Left out on purpose: measuring across processes; a strategy of several ranks brings its own `norm`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.optim.clipping import clip_factor, model_gradient_norm
from shared.optim.loss_scale import LossScaler


class Update:
    """An updater for `train_step`.

    After a step, `gradient_norm` ([] float) is the length of the mean loss's gradient before clipping, `clipped` whether it was
    shortened ([] bool, None without clipping), and `skipped` the number of steps that were left out so far because of an overflow.

    Args:
        max_norm: the longest gradient that is allowed; None for no clipping.
        loss_scaler: the scale that the runner multiplied the loss by; None where it did not.
        norm: measures the gradient; `grad_norm` of a strategy measures it once a step over all ranks, the same number on all of them.

    Raises:
        ValueError: max_norm is not positive.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        norm: Callable[[nn.Module], Tensor] = model_gradient_norm,
    ):
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}: give a positive length, or None for no clipping.")
        self.max_norm, self.loss_scaler, self.norm = max_norm, loss_scaler, norm
        self.gradient_norm: Tensor | None = None
        self.clipped: Tensor | None = None
        self.skipped = 0

    def __call__(self, model: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
        """Divide, clip, step; the gradients are changed in place. A skipped step leaves weights and optimizer as they were.

        Raises:
            ValueError: token_count is 0; nothing has changed.
        """
        if token_count == 0:
            raise ValueError("No target counted in this step (all are -100): the mean loss is undefined. Check the data's masks.")
        divisor = token_count if self.loss_scaler is None else token_count * self.loss_scaler.state.scale
        self.gradient_norm = self.norm(model) / divisor
        if self.loss_scaler is not None:
            finite = bool(self.gradient_norm.isfinite())
            self.loss_scaler.update(finite)
            if not finite:
                self.skipped += 1
                return
        factor = torch.ones_like(self.gradient_norm)
        if self.max_norm is not None:
            factor = clip_factor(self.gradient_norm, self.max_norm)
            self.clipped = factor < 1
        factor /= divisor
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        optimizer.step()
