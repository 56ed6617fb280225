"""Chapter 05. Clipping: a gradient longer than allowed is shortened, and keeps its direction.

One bad batch can have a gradient a hundred times the usual. With clipping, no step's gradient is longer than `max_norm`, which is measured
over all parameters together (Pascanu et al. 2013, section 3.2), so the proportions between them stay.

Left out on purpose: clipping each element or each tensor by itself, which turns the gradient.
"""

from torch import Tensor, nn

from shared.engine.metrics.gradient_norm import global_gradient_norm


def model_gradient_norm(model: nn.Module) -> Tensor:
    """The length of the whole gradient of a model that this process holds: [] float32."""
    return global_gradient_norm(parameter.grad for parameter in model.parameters())


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply a gradient of length `norm` by, so that it is at most `max_norm`: [] like `norm`, never above 1.

    The 1e-6 is PyTorch's: a gradient of length 0 is multiplied by 1.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
