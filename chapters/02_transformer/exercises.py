"""Your part of chapter 02. Write each body in place of its `raise` line, in any order.

    course check 02          checks what you wrote
    course hint 02.grouped_query_attention    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


# Grouped-query attention (35 min, difficulty 4 of 5)
def grouped_query_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention in which group g of H / K query heads shares key-value head g (Ainslie et al. 2023, section 2.2).

        weights[h, i, :] = softmax over the j that i may look at of (queries[h, i] . keys[g, j] * scale + bias[h, i, j])
        out[h, i] = sum over j of weights[h, i, j] * values[g, j]          with g = h // (H / K)

    The check refuses torch's own `scaled_dot_product_attention`.

    Args:
        queries: [batch, H, Q, d].
        keys, values: [batch, K, T, d]; K divides H. Neither they nor the queries are changed.
        mask: bool, broadcastable to [batch, H, Q, T] (its second size is 1), True where a query may look; None: everywhere.
        bias: float, broadcastable to [batch, H, Q, T], added to the scaled scores; None for 0.
        scale: None for d ** -0.5.

    Returns:
        [batch, H, Q, d] in the dtype of `values`. Half-precision scores become float32 before the bias is added, and the
        softmax is computed in float32 (float64 for float64 input). A query that may look nowhere gets zeros, and passes a
        gradient of zero; any other NaN is not hidden.

    >>> queries, values = torch.zeros(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]])
    >>> grouped_query_attention(queries, values, values)                       # equal scores: the mean of the values
    tensor([[[[2., 2.]]]])
    >>> grouped_query_attention(queries, values, values, mask=torch.tensor([[[[True, False]]]]))
    tensor([[[[1., 0.]]]])
    """
    raise NotImplementedError("02.grouped_query_attention: write this body")


# Rotary positions (20 min, difficulty 3 of 5)
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its position's angle: RoPE (Su et al. 2021, equation 34), in the half-rotated layout.

    A pair is a point in the plane, and is turned from the first axis towards the second. An angle with cosine c and sine s takes (1, 0) to
    (c, s), and (0, 1) to (-s, c); any other pair is a sum of these two. Pair i has the angle of cos[..., i] and sin[..., i].

    Args:
        x: [batch, heads, seq, d], any floating dtype; d is even. Left unchanged.
        cos, sin: [seq, d/2], or [batch, 1, seq, d/2] where rows have positions of their own. float32.

    Returns:
        [batch, heads, seq, d] in the dtype of `x`. The rotation is computed in float32 (float64 for float64 input).

    >>> x = torch.tensor([[[[1.0, 2.0, 0.0, 0.0]]]])               # pairs (1, 0) and (2, 0)
    >>> quarter, none = torch.tensor(0.0), torch.tensor(1.0)       # a quarter turn, no turn
    >>> apply_rope(x, torch.stack([quarter, none])[None], torch.stack([none, quarter])[None])
    tensor([[[[0., 2., 1., 0.]]]])
    """
    raise NotImplementedError("02.apply_rope: write this body")


# RMSNorm (10 min, difficulty 2 of 5)
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
    raise NotImplementedError("02.rms_norm: write this body")


# SwiGLU (5 min, difficulty 1 of 5)
def swiglu(
    x: Tensor,
    gate: Callable[[Tensor], Tensor],
    up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """The gated feed-forward layer (Shazeer 2020, equation 6): one projection decides how much of the other passes.

    Number by number, what `gate` made of x, behind the activation function, is multiplied with what `up` made of it; `down` leads back
    to the width of x. The activation function is on the gate alone. Nothing that a function returned is changed: it may be x itself.

    Args:
        x: [..., D]. Left unchanged.
        gate, up: [..., D] -> [..., I]. Each is called once.
        down: [..., I] -> [..., D]. Called once.
        activation: [..., I] -> [..., I]; SiLU, x * sigmoid(x), makes it SwiGLU, GELU makes it GeGLU.

    Returns:
        [..., D].

    >>> x = torch.tensor([1.0, -1.0])
    >>> swiglu(x, gate=lambda x: 10 * x, up=lambda x: x + 2, down=lambda x: 2 * x)     # silu(10) is 10, silu(-10) about 0
    tensor([59.9973, -0.0009])
    """
    raise NotImplementedError("02.swiglu: write this body")


# The block, pre-norm and post-norm (10 min, difficulty 2 of 5)
def block_forward(x: Tensor, sublayers: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]], pre_norm: bool) -> Tensor:
    """Pass the residual stream through a block's sublayers, in order (Xiong et al. 2020, table 1).

    Each sublayer's output is added to the stream. In a pre-norm block a sublayer reads the stream through its norm, and the stream itself
    passes no norm. In a post-norm block a sublayer reads the stream as it is, and its norm is applied to the sum, which is the stream for
    the next one. Nothing that a function returned is changed: it may be the stream itself.

    Args:
        x: [batch, seq, D]. Left unchanged.
        sublayers: pairs (norm, sublayer) of functions [batch, seq, D] -> [batch, seq, D]: attention, then feed-forward; in
            a decoder with an encoder, cross-attention stands between them. Each function is called once. There may be none.
        pre_norm: which of the two.

    Returns:
        [batch, seq, D].

    >>> double, minus_one = (lambda x: 2 * x), (lambda x: x - 1)
    >>> block_forward(torch.tensor([[[3.0]]]), [(minus_one, double)], pre_norm=True)      # 3 + 2 * (3 - 1)
    tensor([[[7.]]])
    >>> block_forward(torch.tensor([[[3.0]]]), [(minus_one, double)], pre_norm=False)     # (3 + 2 * 3) - 1
    tensor([[[8.]]])
    """
    raise NotImplementedError("02.block_forward: write this body")
