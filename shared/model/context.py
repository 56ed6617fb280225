"""Chapter 02. Attention context: what all layers of a stack share in one forward pass, and auxiliary losses of single layers.

Masks, RoPE tables, the key-value cache and an encoder's output are made or taken once and read by every block. It also holds
what a router needs (chapter 09): which tokens count in the loss, and the scale of the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.model.masks import AttentionMask
from shared.model.rope import RopeTables


class KeyValueCache:
    """The KV cache: keys and values of past positions, for generation. Chapter 12 derives its caches from this.

    length: positions before this forward pass. Generation raises it when the pass is done.
    """

    length: int = 0

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in [batch, K, new, d] keys (after RoPE) and values; return those that the queries attend to: [batch, K, T, d].

        Each layer's attention calls it once per forward pass.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(layer, keys, values).")

    def keys(self, layer_type: str, queries: Tensor) -> Tensor | None:
        """The positions of the T keys that `update` will return in layers of this type; None for all positions so far, in order.

        A ring of a sliding window and a preallocated cache say it: [T] int64 in the order of the keys, -1 for a slot that is empty.

        Args:
            layer_type: "full_attention" or "sliding_attention".
            queries: [new] int64, the positions of this forward pass; `length` is that of the first.
        """
        return None


@dataclass
class AttentionContext:
    """What blocks need in addition to their input. A stack makes it once per forward pass.

    masks: "full_attention" and, where a layer has that type, "sliding_attention" -> what attention takes.
    rope: the tables of the queries' positions, or None.
    cache: keys and values of positions before these, or None.
    memory: [batch, T, D], the encoder's output that cross-attention attends to, or None.
    memory_mask: which part of it each query attends to.
    valid: [batch, seq] bool, the tokens that count in the loss; None for all of them. Or float, what each of them weighs, 0 for none.
    loss_scale: what the loss is multiplied by before its backward pass; see `add_auxiliary_loss`.
    over_row: where other ranks have the other positions of each row: what was counted here, [batch, ...], -> the sum over these ranks. It
        is communication, and has no gradient. None where the rows are whole.
    """

    masks: dict[str, AttentionMask]
    rope: RopeTables | None = None
    cache: KeyValueCache | None = None
    memory: Tensor | None = None
    memory_mask: AttentionMask | None = None
    valid: Tensor | None = None
    loss_scale: float = 1.0
    over_row: Callable[[Tensor], Tensor] | None = None


def add_auxiliary_loss(x: Tensor, loss: Tensor, loss_scale: float) -> Tensor:
    """`x` unchanged, with an auxiliary loss attached: the backward pass through it adds the loss's gradient.

    A loss that a module keeps in an attribute is cut off from its graph where the module runs again in the backward pass (activation
    checkpointing) or on another rank (a pipeline). Attached to the activations it is part of the graph wherever they are.
    Like `Totals.loss_sum` the loss is a sum over tokens, because it is divided by the step's token count too.

    Args:
        x: activations that the objective's loss depends on, such as the layer's input or output.
        loss: [], in nats, already multiplied by its coefficient.
        loss_scale: `context.loss_scale`, since the gradients that arrive from above are scaled by it.
    """
    return AuxiliaryLoss.apply(x, loss, loss_scale)


class AuxiliaryLoss(torch.autograd.Function):
    """The identity of x whose backward pass starts that of a second loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, loss_scale: float) -> Tensor:
        if loss.dim():
            raise ValueError(f"An auxiliary loss is one number, not {list(loss.shape)}: give its sum over tokens.")
        ctx.gradient = loss.new_full((), loss_scale)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        return upstream, ctx.gradient, None


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that linear layers would cast it to under autocast; unchanged without.

    Each linear layer casts its own input. Queries, keys and values come from one tensor, gate and up from another: casting
    before them gives the same numbers once instead of three times, and keeps one copy for the backward pass.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
