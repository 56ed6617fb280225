"""Chapter 07. Context parallelism as an axis of the mesh: each sequence is sharded over ranks, with ring attention between them.

    a batch, the same on all ranks of cp  ->  this rank's positions of it  ->  the model  ->  loss sum and token count of those positions

Everything but attention treats each position alone, so it needs no change, except what is counted over a row (`over_row`). Losses, counts
and gradients are summed over the ranks, as in data parallelism (`Mesh.loss`). A model that is called outside of an objective, for
generation, gets whole sequences on each rank and computes as one process does.

Left out on purpose, and refused: encoder-decoders, which have two sequences to shard; relative position biases, of which the ring computes
no gradient; and attention dropout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.attention import Attention
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, KeyValueCache, to_compute_dtype
from shared.model.masks import Mask
from shared.model.rope import rope_tables
from shared.model.block import Stack
from shared.model.transformer import TransformerModel
from shared.parallel.context.ring import ring_attention
from shared.parallel.context.zigzag import ContextMask, SequenceShare
from shared.parallel.data.engine import DataEngine
from shared.parallel.mesh import Axis, Mesh
from shared.totals import Objective

Attend = Callable[[Tensor, Tensor, Tensor, ContextMask, float], Tensor]


class ContextParallel(Axis):
    """Context parallelism.

    Args:
        attend: attention over the ranks: `ring_attention`, or `gathered_attention`, the first version.
    """

    brings = ("context_parallel",)

    def __init__(self, attend: Attend = ring_attention):
        self.attend = attend

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        """Refuse what cannot be sharded along the sequence. Parameters stay as they are."""
        if mesh.cp.size > 1:
            require_known(model)
            require_shareable(model.config)

    def engine(self, model: nn.Module, mesh: Mesh) -> DataEngine | None:
        """Give objectives this rank's positions, and the model's attention those of all ranks."""
        if mesh.cp.size == 1:
            return None
        share = SequenceShare(mesh.cp)
        model.register_forward_pre_hook(with_positions(share), with_kwargs=True)
        if model.embedding is not None:
            model.embedding.register_forward_pre_hook(lambda module, inputs: (*inputs[:3], share.length or inputs[3]))
        model.stack.context = context_of_share(model.stack, share)
        for block in model.stack.blocks.values():
            block.attention.attend = over_ranks(self.attend, block.attention.attend)
        return OverPositions(model, mesh, share)


class OverPositions(DataEngine):
    """The engine of context parallelism: objectives get this rank's positions."""

    def __init__(self, model: nn.Module, mesh: Mesh, share: SequenceShare):
        super().__init__(model, mesh.loss)
        self.optim_params, self.share = nn.Module(), share  # empty: the data engines serve the parameters

    def objective(self, objective: Objective) -> Objective:
        return self.share.of_share(objective)


def require_shareable(config: ModelConfig) -> None:
    """Refuse a model whose attention cannot be computed by a ring."""
    wrong = [
        (config.architecture == "encoder-decoder", "model.architecture is encoder-decoder, which has two sequences to share out"),
        (config.position == "relative", "model.position is relative, a learned bias for which the ring computes no gradient"),
        (config.attention_dropout, f"model.attention_dropout is {config.attention_dropout}, and the ring draws no dropout"),
    ]
    for is_wrong, reason in wrong:
        if is_wrong:
            raise SettingError(f"{reason}: change it, or set parallel.context_parallel to 1.")


def require_known(model: nn.Module) -> None:
    """Refuse modules that context parallelism does not know."""
    if type(model) is not TransformerModel:
        raise SettingError(f"Context parallelism is for a TransformerModel, not a {type(model).__name__}.")
    for name, block in model.stack.blocks.items():
        if type(block.attention) is not Attention:
            raise SettingError(
                f"Context parallelism does not know {type(block.attention).__name__}, the attention of block {name}: set "
                "parallel.context_parallel to 1."
            )


def with_positions(share: SequenceShare) -> Callable[..., tuple[tuple, dict[str, Any]]]:
    """A forward pre-hook of the model: default positions count from the start of the whole sequence. Training passes over whole sequences
    are refused, of which gradients would be summed n times."""

    def hook(model: nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if share.length is None:
            if model.training and torch.is_grad_enabled():
                raise ValueError("Under context parallelism a training pass sees a share of each sequence: call strategy.objective(...).")
            return inputs, options
        ids = inputs[0] if inputs else options["input_ids"]
        given = options.get("positions")
        return inputs, options | {"positions": share.indices(share.length, ids.device) if given is None else given}

    return hook


def context_of_share(stack: Stack, share: SequenceShare) -> Callable[..., AttentionContext]:
    """`Stack.context` for a rank's positions: masks and biases by chunks, rotations for the whole sequence's length."""
    of_whole = stack.context

    def context(
        queries: Tensor, positions: Tensor, length: int, mask: Mask | None = None, pattern: Mask | None = None,
        cache: KeyValueCache | None = None,
    ) -> AttentionContext:  # fmt: skip
        if share.length is None:
            return of_whole(queries, positions, length, mask, pattern, cache)
        masks = {
            name: ContextMask(rule, share.group, share.length, stack.position_bias, queries.device)
            for name, rule in sorted(stack.rules(mask, pattern).items())  # in the same order on all ranks, which exchange answers
        }
        rope = rope_tables(stack.config, positions, share.length) if stack.config.position == "rope" else None
        return AttentionContext(masks, rope, cache, over_row=over_row)

    def over_row(counted: Tensor) -> Tensor:
        whole = counted.clone()
        share.group.all_reduce(whole)
        return whole

    return context


def over_ranks(attend: Attend, of_whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The attention kernel: over the ranks for a sharded sequence, unchanged for a whole one. Under autocast PyTorch's kernel casts its
    inputs, and the ring does not: norms leave queries and keys in float32."""

    def run(queries: Tensor, keys: Tensor, values: Tensor, mask: Any, scale: float, dropout: float) -> Tensor:
        if isinstance(mask, ContextMask):
            return attend(*map(to_compute_dtype, (queries, keys, values)), mask, scale)
        return of_whole(queries, keys, values, mask, scale, dropout)

    return run
