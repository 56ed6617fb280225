"""Chapter 02. Attention with several heads, grouped-query (GQA) or not, eager or by SDPA: a weighted mean of values.

    weights = softmax(Q K^T * scale), out = weights V          (Vaswani et al. 2017, equation 1)

With fewer key-value heads than query heads (grouped-query attention, Ainslie et al. 2023; one: multi-query, Shazeer 2019)
several queries share a key and value. `grouped_query_attention` writes the equation out and keeps a [Q, K] matrix of
weights per head (eager); `sdpa_attention` is PyTorch's kernel for scaled dot-product attention, which never holds that matrix. They
agree to rounding.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, to_compute_dtype
from shared.model.document_attention import attend_documents
from shared.model.masks import AttentionMask
from shared.model.rope import apply_rope


@exercise("02.grouped_query_attention")
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


def eager_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float, dropout: float) -> Tensor:
    """`grouped_query_attention` with the kernel's signature.

    Raises:
        ValueError: a mask in the kernel's own form, or dropout: it would ignore both.
    """
    if mask.causal or mask.documents or dropout:
        raise ValueError("Eager attention has no causal flag and no dropout: call to_attention_mask with sdpa=False, and set dropout to 0.")
    return grouped_query_attention(queries, keys, values, mask.allowed, mask.bias, scale)


def sdpa_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float, dropout: float) -> Tensor:
    """The same through PyTorch's kernel. Shapes as in `grouped_query_attention`.

    Sharing heads is left to the kernel only where no tensor masks: with one, some devices would fall back to the slow path.

    Raises:
        ValueError: the causal flag with more keys than queries, for which the kernel would hide the wrong ones.
    """
    if mask.documents is not None:
        return attend_documents(queries, keys, values, mask.documents, scale, dropout)
    if mask.causal and queries.shape[2] != keys.shape[2]:
        lengths = f"{queries.shape[2]} and {keys.shape[2]}"
        raise ValueError(f"The causal flag is for as many queries as keys, not {lengths}: give a mask as a tensor.")
    tensor = mask.allowed if mask.bias is None else mask.bias.to(queries.dtype)
    groups = queries.shape[1] // keys.shape[1]
    if tensor is not None and groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=tensor, dropout_p=dropout, is_causal=mask.causal, scale=scale, enable_gqa=groups > 1
    )


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same under a tensor that masks: bool, or a bias. Where heads share keys on a GPU, only the slow path takes both: one query a row
    is given as if its heads were tokens, and of several queries each head gets keys of its own."""
    groups = queries.shape[1] // keys.shape[1]
    if groups == 1 or not queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=groups > 1)
    if queries.shape[2] == 1 and mask.shape[1] == 1:
        grouped = queries.reshape(len(queries), keys.shape[1], groups, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale).reshape(queries.shape)
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)


class Attention(nn.Module):
    """Projections, RoPE, attention, output projection: [batch, seq, D] -> [batch, seq, D].

    The number of heads is read off the projections' outputs, so that a module with a part of the heads works alike.

    Args:
        config: a resolved configuration.
        layer: the block's number, from 0.
        cross: attend to `context.memory` instead of the input itself.
    """

    def __init__(self, config: ModelConfig, builders: Builders, layer: int, cross: bool = False):
        super().__init__()
        self.layer, self.cross = layer, cross
        self.layer_type = config.layer_types[layer]
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        self.dropout = config.attention_dropout
        self.attend = sdpa_attention if config.attention == "sdpa" else eager_attention
        inner, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = builders.linear("q_proj", config.hidden_size, inner, config.attention_bias)
        self.k_proj = builders.linear("k_proj", config.hidden_size, shared, config.attention_bias)
        self.v_proj = builders.linear("v_proj", config.hidden_size, shared, config.attention_bias)
        self.o_proj = builders.linear("o_proj", inner, config.hidden_size, config.attention_output_bias)
        self.norm_heads = config.qk_norm_over == "head"
        sizes = (config.head_dim, config.head_dim) if self.norm_heads else (inner, shared)
        self.q_norm, self.k_norm = (builders.norm(config, size) if config.qk_norm else None for size in sizes)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = to_compute_dtype(x)
        source = to_compute_dtype(context.memory) if self.cross else x
        queries, keys = self.q_proj(x), self.k_proj(source)
        if self.q_norm is not None and not self.norm_heads:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = self.split_heads(queries), self.split_heads(keys), self.split_heads(self.v_proj(source))
        if self.q_norm is not None and self.norm_heads:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if context.rope is not None and not self.cross:
            queries, keys = apply_rope(queries, *context.rope), apply_rope(keys, *context.rope)
        if context.cache is not None and not self.cross:
            keys, values = context.cache.update(self.layer, keys, values)
        mask = context.memory_mask if self.cross else context.masks[self.layer_type]
        mixed = self.attend(queries, keys, values, mask, self.scale, self.dropout if self.training else 0.0)
        return self.o_proj(mixed.transpose(1, 2).flatten(start_dim=2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * d] -> [batch, heads, seq, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
