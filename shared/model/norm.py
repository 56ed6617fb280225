"""Chapter 02. RMSNorm and layer norm: keep each position's vector at a length that the next layer can count on.

LayerNorm (Ba et al. 2016) subtracts the mean and divides by the standard deviation. RMSNorm (Zhang and Sennrich 2019)
divides by the root mean square and leaves the mean alone: x / sqrt(mean(x^2) + eps) * weight. Both compute in float32,
whatever the dtype of what comes in: squares of half-precision numbers overflow at 256.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.course.binding import exercise
from shared.model.config import ModelConfig


@exercise("02.rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: root-mean-square normalisation of the last dimension (Zhang and Sennrich 2019, equation 4).

    Each vector is divided by its root mean square, and then multiplied number by number with the weight. Its mean is left alone.
    NaN is not hidden: it makes its whole vector NaN, and no other one. The check refuses torch's own `rms_norm` and `layer_norm`.

    Args:
        x: [..., D], any floating dtype. Left unchanged.
        weight: [D]; float32 beside a half-precision `x` is allowed, and then so is the result.
        eps: added to the mean square, inside the root.

    Returns:
        [..., D]. The statistics are computed in float32 (float64 for float64 input), and the normalised vector is cast to
        the dtype of `x` before it is multiplied by the weight.

    A half-precision vector whose squares overflow its dtype must come out right.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 10.0]), eps=0.0)      # sqrt((9 + 16) / 2) = 3.5355
    tensor([ 0.8485, 11.3137])
    """


class RMSNormFunction(torch.autograd.Function):
    """`rms_norm` with its gradient written out, so that a training step keeps the input and nothing else.

    With n = x / rms(x) and u = upstream * weight, the gradient of x is (u - n mean(u n)) / rms(x), that of the weight the
    sum of upstream * n over rows. Autograd would keep n too, and go over memory twice as often for the same numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        wide, upstream, wide_weight = x.to(dtype), upstream.to(dtype), weight.to(dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length * length / x.shape[-1] + ctx.eps)
        normalised = wide * inverse
        products = upstream * normalised
        mean = (products @ wide_weight).unsqueeze(-1) / x.shape[-1]
        of_x = torch.addcmul(upstream * wide_weight, normalised, mean, value=-1) * inverse
        return of_x.to(x.dtype), products.flatten(0, -2).sum(dim=0).to(weight.dtype), None


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return RMSNormFunction.apply(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias; PyTorch's kernel keeps its statistics in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, x.dtype)  # fully sharded weights are gathered in 16 bits, for a float32 stream
        return F.layer_norm(x, self.weight.shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


def build_norm(config: ModelConfig, size: int) -> nn.Module:
    """The configured norm over the last `size` elements: the default of `Builders.norm`."""
    return {"rms_norm": RMSNorm, "layer_norm": LayerNorm}[config.norm](size, config.norm_eps)
