"""Chapter 07. Blockwise attention (FlashAttention's algebra): attention to a block of keys with its log-sum-exp, and how parts merge.

    part over keys B       lse_B = log sum_j in B exp(s_j)           out_B = sum_j in B exp(s_j - lse_B) v_j
    merged                 lse = log(exp(lse_A) + exp(lse_B))        out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

(Dao et al. 2022, section 3.1; Milakov and Gimelshein 2018.) Each part's softmax is normalised over its own keys, and its log-sum-exp is its
weight in the merge. The backward pass needs no merge: with the final log-sum-exp, p_j = exp(s_j - lse) is the weight of each key, so the
gradients of parts are added (Dao et al. 2022, appendix B.2).

Left out on purpose: GPU kernels that return their log-sum-exp: on a GPU the scores of one block are materialized in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.model.masks import AttentionMask

aten = torch.ops.aten


class Part(NamedTuple):
    """Attention to a block of keys.

    out: [batch, H, Q, d] float32 at least; 0 where a query attends to none of them.
    lse: [batch, H, Q], the log-sum-exp of its scores; -inf there.
    """

    out: Tensor
    lse: Tensor


@exercise("07.merge_attention")
def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to some of the keys with attention to others, as ring and flash attention do (Dao et al. 2022, section 3.1).

        out = sum over keys j of exp(s_j - lse) v_j          lse = log of the sum over keys j of exp(s_j)

    Each of the two was computed as if its keys were all there are: a softmax over its own scores s. The log-sum-exp is the
    logarithm of the sum of their exponentials, by which the two are weighed as one softmax over all keys would weigh them.

    Scores of a few hundred are common, and exp overflows from 89 on in float32. Take no exponential of anything above 0.

    Args:
        out, other_out: [batch, heads, queries, d], any floating dtype; 0 where the query may look at none of these keys.
        lse, other_lse: [batch, heads, queries] in float32 (float64 for float64 outputs); -inf there.

    Returns:
        out, lse of attention to the keys of both, in the shapes of the arguments, computed and returned in float32 (float64 for float64),
        because a ring merges many times. A query that may look at no key of either gets an output of 0 and -inf, and nothing is NaN.

    >>> out, other_out = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[5.0, 2.0]]]])
    >>> merge_attention(out, torch.tensor([[[0.0]]]), other_out, torch.tensor([[[0.0]]]))      # equally heavy: the mean of the two
    (tensor([[[[3., 1.]]]]), tensor([[[0.6931]]]))
    >>> merge_attention(out, torch.tensor([[[7.0]]]), 0 * other_out, torch.tensor([[[-torch.inf]]]))
    (tensor([[[[1., 0.]]]]), tensor([[[7.]]]))
    """


def attend_block(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float) -> Part:
    """Attention of a block of queries to a block of keys.

    Args:
        queries: [batch, H, Q, d].
        keys, values: [batch, K, T, d]; K divides H.
        mask: the block's mask and position bias.
    """
    keys, values = for_each_head(keys, queries), for_each_head(values, queries)
    if has_kernel(queries):
        options = {"attn_mask": score_terms(mask, queries.dtype), "scale": scale}
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, mask.causal, **options)
        out = out.to(lse.dtype)
    else:
        scores = block_scores(queries, keys, mask, scale)
        lse = scores.logsumexp(dim=-1)
        out = weights_of(scores, lse) @ values.to(scores.dtype)
    if mask.allowed is not None:  # a kernel may return 0 where all keys are masked
        lse = lse.masked_fill(~mask.allowed.any(dim=-1), -torch.inf)
    return Part(out, lse)


def block_gradients(
    upstream: Tensor, queries: Tensor, keys: Tensor, values: Tensor, whole: Part, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's contribution to the gradients of its queries, keys and values, from recomputed scores.

    Args:
        upstream: [batch, H, Q, d], the gradient of the output over all keys.
        whole: attention of these queries to all keys; its `out` has the dtype of `upstream`.
    """
    heads = keys.shape[1]
    keys, values = for_each_head(keys, queries), for_each_head(values, queries)
    lse = whole.lse.masked_fill(whole.lse == -torch.inf, 0)  # a fully masked query: exp(-inf - 0) = 0, and no NaN
    if has_kernel(queries):
        options = {"attn_mask": score_terms(mask, queries.dtype), "scale": scale}
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, queries, keys, values, whole.out, lse, 0.0, mask.causal, **options
        )
    else:
        weights = weights_of(block_scores(queries, keys, mask, scale), lse)
        queries, keys, values, upstream, out = (x.to(weights.dtype) for x in (queries, keys, values, upstream, whole.out))
        of_scores = weights * (upstream @ values.mT - (upstream * out).sum(dim=-1, keepdim=True)) * scale
        found = of_scores @ keys, of_scores.mT @ queries, weights.mT @ upstream
    return found[0], *(gradient.unflatten(1, (heads, -1)).sum(dim=2, dtype=lse.dtype) for gradient in found[1:])


def has_kernel(queries: Tensor) -> bool:
    """Whether PyTorch's kernel for this device returns its log-sum-exp and takes any mask."""
    return queries.is_cpu


def for_each_head(shared: Tensor, queries: Tensor) -> Tensor:
    """Keys or values [batch, K, T, d] repeated for the query heads that share them: [batch, H, T, d]."""
    groups = queries.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, dim=1)


def score_terms(mask: AttentionMask, dtype: torch.dtype) -> Tensor | None:
    """The term added to the scores, [batch or 1, H or 1, Q, T]: the bias, and -inf where masked; None for none."""
    if mask.allowed is None:
        return None if mask.bias is None else mask.bias.to(dtype)
    terms = torch.zeros_like(mask.allowed, dtype=dtype) if mask.bias is None else mask.bias.to(dtype)
    return terms.masked_fill(~mask.allowed, -torch.inf)


def block_scores(queries: Tensor, keys: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """[batch, H, Q, T] in float32 at least."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(dtype) @ keys.to(dtype).mT * scale
    if mask.causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    terms = score_terms(mask, dtype)
    return scores if terms is None else scores + terms


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 for a fully masked query."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
