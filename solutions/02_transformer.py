"""Solutions of chapter 02. Each body with the reason why it is written this way."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The mean square comes from the vector's length, one fused reduction, where `x.pow(2).mean()` would make and keep a
    tensor of squares. Casting before the weight is Hugging Face's order; the other differs in half precision by a rounding."""
    wide = x if x.dtype == torch.float64 else x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    normalised = wide * torch.rsqrt(length * length / x.shape[-1] + eps)
    return normalised.to(x.dtype) * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each number times cos, plus its partner times sin with its sign: whole vectors are multiplied, because products of halves,
    whose rows are short, took three times as long on a CPU. float32 tables lift half-precision x, so only the result needs a cast."""
    first, second = x.chunk(2, dim=-1)
    turned = x * torch.cat((cos, cos), dim=-1) + torch.cat((second, first), dim=-1) * torch.cat((-sin, sin), dim=-1)
    return turned.to(x.dtype)


def grouped_query_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The group becomes a dimension of its own that keys and values are broadcast over, so no head is copied. The softmax of
    a query that may look nowhere is NaN; the second fill makes it 0, and the backward of the first one keeps NaN from the
    scores' gradient. For all other queries the hidden weights are 0 already."""
    groups = keys.shape[1]
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    grouped = queries.unflatten(1, (groups, -1))
    scores = (grouped @ keys.unsqueeze(2).transpose(-2, -1)).flatten(1, 2) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    weights = weights.to(values.dtype).unflatten(1, (groups, -1))
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def swiglu(
    x: Tensor,
    gate: Callable[[Tensor], Tensor],
    up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """The activation stands on the gate alone: `up` passes as it is, so the layer can multiply two things it computed."""
    return down(activation(gate(x)) * up(x))


def block_forward(
    x: Tensor, sublayers: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]], pre_norm: bool
) -> Tensor:
    """`x = x + ...`, not `x += ...`: the sum must be a new tensor, since backward still needs the old one."""
    for norm, sublayer in sublayers:
        x = x + sublayer(norm(x)) if pre_norm else norm(x + sublayer(x))
    return x
