"""Chapter 12. A fused decoding step: the pass over one token of each row, with fewer and larger operations than the model's modules need.

    queries, keys, values      one product        gate, up       one product        cos, sin       looked up once for all layers

At one row a product takes about as long as starting a handful of small operations, so that their number decides. The step computes what the
model computes, to rounding. Weights are arranged once for all steps, which copies those that are put side by side.

Left out on purpose: models with other modules than chapter 02's, or with hooks, or in parts on several ranks. Their passes are their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.attention import Attention
from shared.model.block import Block
from shared.model.embedding import Embedding, Head
from shared.model.feed_forward import FeedForward, GatedFeedForward
from shared.model.norm import LayerNorm, RMSNorm
from shared.model.positions import RelativeBias
from shared.model.rope import rope_tables
from shared.model.stack import Stack
from shared.model.transformer import TransformerModel
from shared.preference.value_head import ScalarProjection

KNOWN = (
    TransformerModel, Stack, nn.ModuleDict, Block, Attention, FeedForward, GatedFeedForward, RMSNorm, LayerNorm, Embedding, Head,
    RelativeBias, ScalarProjection, nn.Linear, nn.Embedding, nn.Dropout, nn.Identity,
)  # fmt: skip
Attend = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]


class Linear(NamedTuple):
    """One or several linear layers of the same input, side by side: [rows, in] -> [rows, the sum of their outputs].

    weight: [in, out], a view.
    """

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(*layers: nn.Linear) -> "Linear":
        if len(layers) == 1:
            return Linear(layers[0].weight.t(), layers[0].bias)
        biases = [layer.bias for layer in layers]
        return Linear(torch.cat([layer.weight for layer in layers]).t(), None if biases[0] is None else torch.cat(biases))

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out] + self(x)."""
        total = torch.addmm(residual, x, self.weight)
        return total if self.bias is None else total.add_(self.bias)


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
        model: one that `fits`.
        places: a row's tokens, at most.
        attend: attend(attention, queries [rows, H, 1, d], keys and values [rows, K, 1, d]) -> [rows, H, 1, d]: a layer's attention over its
            cache.
    """

    def __init__(self, model: TransformerModel, places: int, attend: Attend):
        self.model, self.attend = model, attend
        self.head = Linear.of(model.head.linear)
        self.blocks = [
            Layer(
                block,
                Linear.of(block.attention.q_proj, block.attention.k_proj, block.attention.v_proj),
                Linear.of(block.attention.o_proj),
                Linear.of(*((block.feed_forward.gate_proj,) if model.config.gated else ()), block.feed_forward.up_proj),
                Linear.of(block.feed_forward.down_proj),
            )
            for block in model.stack.blocks.values()
        ]
        if model.config.position == "rope":
            cos, sin = rope_tables(model.config, torch.arange(places, device=self.head.weight.device), places)
            self.rope = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether a model is a plain one, whole, in pre-norm, whose every pass would be this one."""
        if type(model) is not TransformerModel or model.embedding is None or model.head is None:
            return False
        if torch.is_autocast_enabled(next(model.parameters()).device.type):
            return False
        config = model.config
        plain = config.architecture == "decoder" and config.norm_position == "pre" and config.head == "linear" and not config.qk_norm
        return plain and config.type_vocab_size == 0 and all(is_plain(module) for module in model.modules())

    @torch.inference_mode()
    def __call__(self, ids: Tensor, places: Tensor) -> Tensor:
        """ids: [rows] int64, one token of each row. places: [rows] int64, where it stands. Returns the logits behind it, [rows, vocab]."""
        model, config = self.model, self.model.config
        x = model.embedding(ids, places, None, 0)
        rope = [table[places, None] for table in self.rope] if config.position == "rope" else None
        for block, projected, output, up, down in self.blocks:
            heads = projected(normed(block.attention_norm, x)).unflatten(-1, (-1, config.head_dim))
            split = config.num_attention_heads + config.num_key_value_heads
            turned = heads[:, :split]
            if rope is not None:
                turned = torch.addcmul(turned * rope[0], turned.roll(config.head_dim // 2, -1), rope[1]).to(x.dtype)
            queries, keys = turned.unsqueeze(2).split((config.num_attention_heads, config.num_key_value_heads), dim=1)
            attended = self.attend(block.attention, queries, keys, heads[:, split:].unsqueeze(2))
            x = output.onto(x, attended.flatten(1))
            h = up(normed(block.feed_forward_norm, x))
            if config.gated:
                gate, h = h.chunk(2, dim=-1)
                h = block.feed_forward.activation(gate) * h
            else:
                h = block.feed_forward.activation(h)
            x = down.onto(x, h)
        x = normed(model.stack.final_norm, x)
        return self.head(x if model.head.scale == 1.0 else x * model.head.scale)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is chapter 02's own, without hooks, compilation or a `forward` of its own."""
    changed = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl or "forward" in vars(module)
    return type(module) in KNOWN and not changed


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """What a norm computes, by PyTorch's own operation for RMSNorm, which starts one kernel."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps) if type(norm) is RMSNorm else norm(x)
