"""Chapter 05. The updater of a real run: gradient clipping, unscaling, and skipped steps where float16 gradients overflow.

Chapter 01's updater divides by the token count and steps. This one folds token count, loss scale and clip factor into one
multiplication: one pass over the gradients measures their norm, a second one scales them.

One bad batch can have a gradient a hundred times the usual. With clipping, no step's gradient is longer than `max_norm`, which is measured
over all parameters together (Pascanu et al. 2013, section 3.2), so the gradient keeps its direction.

Left out on purpose: clipping each element or each tensor by itself, which changes the direction; and measuring across processes: a
strategy of several ranks brings its own `norm`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.optim.loss_scale import LossScaler


def model_gradient_norm(model: nn.Module) -> Tensor:
    """The global gradient norm of a model on one process: [] float32."""
    return global_gradient_norm(parameter.grad for parameter in model.parameters())


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor of gradient clipping, which reduces a gradient of length `norm` to at most `max_norm`: [] like `norm`, never above 1.

    The 1e-6 is PyTorch's, in `clip_grad_norm_`: a gradient of length 0 is multiplied by 1.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Update:
    """An updater for `train_step`, with gradient clipping and loss scaling.

    Attributes after a step: `gradient_norm` ([] float), the norm of the mean loss's gradient before clipping; `clipped`, whether the
    gradient was clipped ([] bool, None without clipping); `skipped`, the number of steps skipped so far because of an overflow.

    Args:
        max_norm: the largest gradient norm (`max_grad_norm`); None for no clipping.
        loss_scaler: the scale that the runner multiplied the loss by; None without loss scaling.
        norm: measures the gradient; `grad_norm` of a strategy measures it once a step over all ranks, the same number on all of them.
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
