"""Chapter 12. A fused decoding step: the pass over one token of each row, with fewer and larger operations than the model's modules need.

    queries, keys, values     one product          weights of an RMSNorm, LoRA updates     factors and parts of the product behind them
    gate, up                  one product          angles, masks, precision of products    found once for all layers

At few rows a product takes about as long as starting a handful of small operations: weights stream through the processor's caches, and push
out what those need. So their number decides. The step computes what the model computes, to rounding. Weights are copied once for
all steps.

Left out on purpose: models with other modules than chapters 02's and 10's, or with hooks, or in parts on several ranks. Their passes are
their own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared.finetune.adapters import merged_weight
from shared.finetune.lora import AdaptedLinear, LowRankUpdate
from shared.model.attention import Attention
from shared.model.block import Block, Stack
from shared.model.embedding import Embedding, Head
from shared.model.feed_forward import FeedForward, GatedFeedForward
from shared.model.norm import LayerNorm, RMSNorm
from shared.model.rope import RelativeBias, rope_tables
from shared.model.transformer import TransformerModel
from shared.preference.value_head import ScalarProjection

KNOWN = (
    TransformerModel, Stack, nn.ModuleDict, Block, Attention, FeedForward, GatedFeedForward, RMSNorm, LayerNorm, Embedding, Head,
    RelativeBias, ScalarProjection, nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, LowRankUpdate,
)  # fmt: skip
PADDING = 16  # numbers, a line of the cache in float32
Attend = Callable[[Attention, Tensor, Tensor], Tensor]


class Linear(NamedTuple):
    """One or several linear layers of the same input, side by side: [rows, in] -> [rows, the sum of their outputs].

    weight: [in, out], in the dtype of the products. bias: [out].
    """

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(*layers: nn.Linear, dtype: torch.dtype, norm: nn.Module | None = None) -> "Linear":
        """The layers' product, with their active low-rank updates merged. norm: of their input; the weight of an RMSNorm becomes a factor
        of theirs."""
        weights = [merged_weight(layer, layer.updates) if getattr(layer, "updates", ()) else layer.weight for layer in layers]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if type(norm) is RMSNorm:
            weight = weight * norm.weight
        biases = [layer.bias for layer in layers]
        return Linear(transposed(weight.to(dtype)), None if biases[0] is None else torch.cat(biases).to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out] + self(x), in the dtype of the residual."""
        if residual.dtype != self.weight.dtype:
            return residual + self(x)
        total = torch.addmm(residual, x, self.weight)
        return total if self.bias is None else total.add_(self.bias)


def transposed(weight: Tensor) -> Tensor:
    """[out, in] -> [in, out]: a view, and of float32 on a CPU a copy. MKL multiplies up to 12 rows with it in half to four fifths of the
    time, if no row begins a power of two behind the one before it: such rows evict one another from the cache."""
    if not weight.is_cpu or weight.dtype != torch.float32:
        return weight.t()
    size = weight.shape[0]
    return weight.new_empty(weight.shape[1], size + PADDING)[:, :size].copy_(weight.t())


class Layer(NamedTuple):
    """A block, and its products. up: gate and up side by side, where there is a gate."""

    block: Block
    projected: Linear
    output: Linear
    up: Linear
    down: Linear


class FusedStep:
    """The pass of a decoder over one token of each row.

    Args:
        model: one that `fits`. Under autocast, the products are in its dtype, and everything else as it is there.
        places: a row's tokens, at most.
        attend: attend(attention, queries [rows, H, 1, d], keys and values side by side [rows, 2 K, 1, d]) -> [rows, H, 1, d]: a layer's
            attention over its cache.
    """

    @torch.inference_mode()
    def __init__(self, model: TransformerModel, places: int, attend: Attend):
        self.model, self.attend = model, attend
        config, weight = model.config, model.head.linear.weight
        self.device_type = weight.device.type
        linear = partial(Linear.of, dtype=dtype_of_products(model))
        self.head = linear(model.head.linear, norm=model.stack.final_norm)
        self.blocks = [
            Layer(
                block,
                linear(block.attention.q_proj, block.attention.k_proj, block.attention.v_proj, norm=block.attention_norm),
                linear(block.attention.o_proj),
                linear(
                    *((block.feed_forward.gate_proj,) if config.gated else ()), block.feed_forward.up_proj, norm=block.feed_forward_norm
                ),
                linear(block.feed_forward.down_proj),
            )
            for block in model.stack.blocks.values()
        ]
        if config.position == "rope":
            cos, sin = rope_tables(config, torch.arange(places, device=weight.device), places)
            self.rope = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self.scale = math.sqrt(config.hidden_size)
        self.zero = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        self.least = self.zero + self.scale * math.sqrt(config.norm_eps)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether a model is a plain one, whole, in pre-norm, perhaps with LoRA's updates, whose every pass would be this one."""
        if type(model) is not TransformerModel or model.embedding is None or model.head is None:
            return False
        config = model.config
        plain = config.architecture == "decoder" and config.norm_position == "pre" and config.head == "linear"
        return plain and config.type_vocab_size == 0 and all(is_plain(module) for module in model.modules())

    @staticmethod
    def copied_bytes(model: TransformerModel) -> float:
        """Bytes of the weights' copies, at most."""
        numbers = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        return dtype_of_products(model).itemsize * numbers

    @torch.inference_mode()
    def __call__(self, ids: Tensor, places: Tensor) -> Tensor:
        """ids: [rows] int64, one token of each row. places: [rows] int64, where it stands. Returns the logits behind it, [rows, vocab]."""
        with torch.autocast(self.device_type, enabled=False):
            return self.logits(ids, places)

    def logits(self, ids: Tensor, places: Tensor) -> Tensor:
        model, config = self.model, self.model.config
        heads, shared, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        normed = self.normed if config.norm == "rms_norm" else lambda norm, x: norm(x)
        rope = [table[places, None] for table in self.rope] if config.position == "rope" else None
        x = model.embedding(ids, places, None, 0)
        for block, projected, output, up, down in self.blocks:
            mixed = projected(normed(block.attention_norm, x)).view(len(ids), heads + 2 * shared, config.head_dim)
            if config.qk_norm:
                normalise_heads(block.attention, mixed.narrow(1, 0, heads), mixed.narrow(1, heads, shared))
            if rope is not None:
                turning = mixed.narrow(1, 0, heads + shared)
                turning.copy_(torch.addcmul(turning * rope[0], turning.roll(config.head_dim // 2, -1), rope[1]))
            mixed = mixed.unsqueeze(2)
            attended = self.attend(block.attention, mixed.narrow(1, 0, heads), mixed.narrow(1, heads, 2 * shared))
            x = output.onto(x, attended.flatten(1))
            h = up(normed(block.feed_forward_norm, x))
            if config.gated:
                h = block.feed_forward.activation(h.narrow(1, 0, inner)) * h.narrow(1, inner, inner)
            else:
                h = block.feed_forward.activation(h)
            x = down.onto(x, h)
        x = normed(model.stack.final_norm, x)
        return self.head(x if model.head.scale == 1.0 else x * model.head.scale)

    def normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """RMSNorm without its weight, x / sqrt(mean(x^2) + eps), by three operations: x sqrt(D) / hypot(|x|, sqrt(D eps))."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self.zero.dtype)
        return torch.addcdiv(self.zero, x, length.hypot_(self.least), value=self.scale)


def dtype_of_products(model: TransformerModel) -> torch.dtype:
    """Autocast's, where it is on; or that of the weights."""
    weight = model.head.linear.weight
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def normalise_heads(attention: Attention, queries: Tensor, keys: Tensor) -> None:
    """Norms of queries [rows, H, d] and keys [rows, K, d], of each head alone or of all together, in place."""
    for norm, part in ((attention.q_norm, queries), (attention.k_norm, keys)):
        part.copy_(norm(part) if attention.norm_heads else norm(part.flatten(1)).view(part.shape))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is chapter 02's own, or such a linear layer with chapter 10's updates, without hooks, compilation or a `forward` of
    its own."""
    changed = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl or "forward" in vars(module)
    kind = module.plain_class if isinstance(module, AdaptedLinear) and module.combine is None else type(module)
    return kind in KNOWN and not changed
