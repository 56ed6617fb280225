"""Chapter 07. Tensor parallelism as an axis of the mesh: cuts a plain transformer's matrices over ranks, in place (Megatron-LM).

    attention      q, k, v by columns (whole heads)    o by rows         feed-forward    gate, up by columns    down by rows
    embedding      by tokens                           head by tokens

Each rank computes its heads and its inner features from the same input; f stands in front of a sublayer, g in its last matrix. What is
not cut (norms, biases of rows) is computed in the same way on every rank and has the whole gradient on each.

With sequence parallelism the residual stream between the sublayers is cut along the sequence: norms, dropout and what they keep for the
backward pass are shared out too. What is not cut then sees this rank's positions only, and its gradient is summed over the ranks
(`partial_over`).

Left out on purpose: layers that this file does not know, which are refused: training them would silently give wrong numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.attention import Attention
from shared.model.block import Block
from shared.model.config import ModelConfig
from shared.model.embedding import Embedding, Head
from shared.model.feed_forward import FeedForward, GatedFeedForward
from shared.model.stack import Stack
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Mesh
from shared.parallel.sharding import Box, Sharding, split_dimension
from shared.parallel.strategy import ParallelStrategy
from shared.parallel.tensor.layers import RowLinear, ShardDropout, VocabularyEmbedding, VocabularyHead, attend_with_own_dropout
from shared.parallel.tensor.operators import (
    copy_to_ranks,
    gather_sequence,
    join_sequence,
    scatter_sequence,
    split_sequence,
    sum_over_ranks,
)


class TensorParallel:
    """Tensor and sequence parallelism."""

    brings = ("tensor_parallel", "sequence_parallel")

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.tp.size == 1:
            return
        require_known(model)
        require_even(model.config, mesh.tp.size)
        if mesh.config.backend == "torch":  # which takes seconds to import
            from shared.parallel.torch_backend.tensor import parallelize_by_torch

            parallelize_by_torch(model, mesh)
            return
        Cutter(mesh, model.config.num_key_value_heads).cut_model(model)

    def around(self, strategy: ParallelStrategy) -> ParallelStrategy:
        return strategy


class Cutter:
    """Cuts the modules of a model over the tensor ranks of a mesh.

    copies: the ranks that hold a copy of the same key and value head, where there are fewer heads than ranks.
    """

    def __init__(self, mesh: Mesh, key_value_heads: int):
        self.group, self.by_sequence = mesh.tp, mesh.config.sequence_parallel
        self.copies: Communicator | None = None
        if mesh.tp.size > key_value_heads:
            ranks = torch.arange(mesh.world.size).view(-1, mesh.tp.size // key_value_heads)  # tp is the mesh's innermost axis
            self.copies = mesh.world.split("tp_copies", ranks.tolist())
        self.enter = partial(gather_sequence if self.by_sequence else copy_to_ranks, group=mesh.tp)
        self.leave = partial(scatter_sequence if self.by_sequence else sum_over_ranks, group=mesh.tp)

    def cut_model(self, model: TransformerModel) -> None:
        tied = model.embedding is not None and model.head is not None and model.head.linear.weight is model.embedding.tokens.weight
        if model.embedding is not None:
            self.cut_embedding(model.embedding)
        if model.head is not None:
            self.cut_head(model.head, model.embedding.tokens.weight if tied else None)
        for stack in filter(None, (model.encoder, model.stack)):
            self.cut_stack(stack, is_last=stack is model.encoder or model.head is not None)

    def cut_embedding(self, embedding: Embedding) -> None:
        tokens = embedding.tokens
        sharding = self.cut(tokens, "weight", uneven_rows(tokens.weight, self.group))
        tokens.__class__, tokens.first, tokens.group = VocabularyEmbedding, sharding.here.offsets[0], self.group

    def cut_head(self, head: Head, tied_to: nn.Parameter | None) -> None:
        rows = uneven_rows(head.linear.weight, self.group) if tied_to is None else tied_to.sharding
        if tied_to is None:
            self.cut(head.linear, "weight", rows)
        else:
            head.linear.weight = tied_to
        if head.linear.bias is not None:
            self.cut(head.linear, "bias", uneven_rows(head.linear.bias, self.group))
        head.__class__, head.group, head.sizes = VocabularyHead, self.group, [box.sizes[0] for box in rows.parts]
        self.state_partial(parameter for name, parameter in head.named_parameters() if not name.startswith("linear."))

    def cut_stack(self, stack: Stack, is_last: bool) -> None:
        """is_last: whether each rank computes a part of what follows the stack, as a head and cross-attention do; a pipeline's other
        stages get the stream whole, and all ranks continue with it."""
        if stack.relative_bias is not None:
            self.cut(stack.relative_bias, "weight", split_dimension(stack.relative_bias.weight, 1, self.group))
        elif stack.config.position == "alibi":
            stack.position_bias = self.own_heads(stack.position_bias)
        for block in stack.blocks.values():
            self.cut_block(block)
        if self.by_sequence:
            stack.run_block = self.splitting(stack.run_block, next(iter(stack.blocks.values())))
            if stack.final_norm is not None:
                self.state_partial(stack.final_norm.parameters())
            leave = partial(gather_sequence if is_last else join_sequence, group=self.group)
            stack.register_forward_hook(lambda module, inputs, x: leave(x))
        elif is_last:
            stack.register_forward_hook(lambda module, inputs, x: copy_to_ranks(x, self.group))

    def cut_block(self, block: Block) -> None:
        self.cut_attention(block.attention)
        if block.cross_attention is not None:
            self.cut_attention(block.cross_attention)
        layer = block.feed_forward
        inner = [layer.up_proj, layer.gate_proj] if isinstance(layer, GatedFeedForward) else [layer.up_proj]
        for linear in inner:
            self.cut_columns(linear)
        self.cut_rows(layer.down_proj)
        layer.register_forward_pre_hook(lambda module, inputs: (self.enter(inputs[0]), *inputs[1:]))
        if self.by_sequence:
            for norm in filter(None, (block.attention_norm, block.cross_attention_norm, block.feed_forward_norm)):
                self.state_partial(norm.parameters())
            if isinstance(block.dropout, nn.Dropout):
                block.dropout.__class__, block.dropout.group = ShardDropout, self.group

    def cut_attention(self, attention: Attention) -> None:
        self.cut_columns(attention.q_proj)
        for linear in (attention.k_proj, attention.v_proj):
            self.cut_heads(linear, attention.head_dim)
        self.cut_rows(attention.o_proj)
        for norm in filter(None, (attention.q_norm, attention.k_norm)):  # of this rank's heads alone
            self.state_partial(norm.parameters())
        if attention.dropout:
            attention.attend = attend_with_own_dropout(attention.attend, self.group.rank)
        attention.register_forward_pre_hook(lambda module, inputs: (self.enter(inputs[0]), *inputs[1:]))

    def cut_columns(self, linear: nn.Linear) -> None:
        for name, parameter in list(linear.named_parameters()):
            self.cut(linear, name, split_dimension(parameter, 0, self.group))

    def cut_heads(self, linear: nn.Linear, head_dim: int) -> None:
        """Key and value heads: some for each rank, or, where there are fewer heads than ranks, each for several ranks, which hold copies.
        Each copy serves other query heads, so the gradient is the sum over the copies."""
        heads, ranks = linear.out_features // head_dim, self.group.size
        if heads % ranks == 0:
            self.cut_columns(linear)
            return
        for name, parameter in list(linear.named_parameters()):
            rest = tuple(parameter.shape[1:])
            boxes = [Box((rank * heads // ranks * head_dim, *(0 for _ in rest)), (head_dim, *rest)) for rank in range(ranks)]
            self.cut(linear, name, Sharding(parameter.shape, tuple(boxes), self.group))
            getattr(linear, name).partial_over = self.copies

    def cut_rows(self, linear: nn.Linear) -> None:
        self.cut(linear, "weight", split_dimension(linear.weight, 1, self.group))
        linear.__class__, linear.combine = RowLinear, self.leave
        if linear.bias is not None and self.by_sequence:
            self.state_partial([linear.bias])

    def cut(self, module: nn.Module, name: str, sharding: Sharding) -> Sharding:
        """Replace a parameter of a module by this rank's part."""
        whole = getattr(module, name)
        part = nn.Parameter(sharding.local(whole.detach()).clone(), requires_grad=whole.requires_grad)
        vars(part).update(vars(whole))
        part.sharding = sharding
        setattr(module, name, part)
        return sharding

    def state_partial(self, parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> None:
        """State that each rank has a part of these parameters' gradients."""
        for parameter in parameters:
            parameter.partial_over = self.group

    def own_heads(self, bias: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """A position bias for the heads of this rank."""
        return lambda queries, keys: bias(queries, keys).chunk(self.group.size, dim=1)[self.group.rank]

    def splitting(self, run_block: Callable[..., Tensor], first: Block) -> Callable[..., Tensor]:
        """Run blocks on this rank's positions: the stream is split in front of the first one."""
        return lambda block, x, context: run_block(block, split_sequence(x, self.group) if block is first else x, context)


def uneven_rows(parameter: Tensor, group: Communicator) -> Sharding:
    """The first dimension in slices that differ by at most one row: how a vocabulary is cut, whose size need not divide."""
    rest = tuple(parameter.shape[1:])
    slices = torch.arange(len(parameter)).tensor_split(group.size)
    boxes = [Box((int(rows[0]), *(0 for _ in rest)), (len(rows), *rest)) for rows in slices]
    return Sharding(parameter.shape, tuple(boxes), group)


def require_known(model: nn.Module) -> None:
    """Refuse a model with modules that tensor parallelism does not know.

    Raises:
        ValueError: names the module and its class.
    """
    if type(model) is not TransformerModel:
        raise ValueError(f"Tensor parallelism cuts a TransformerModel, not a {type(model).__name__}.")
    kinds: dict[str, tuple[type, ...]] = {
        "embedding": (Embedding,), "head": (Head,), "attention": (Attention,), "cross_attention": (Attention,),
        "feed_forward": (FeedForward, GatedFeedForward), "tokens": (nn.Embedding,), "linear": (nn.Linear,),
    }  # fmt: skip
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        known = (nn.Linear,) if last.endswith("_proj") else kinds.get(last)
        if known and type(module) not in known:
            raise ValueError(f"Tensor parallelism does not know how to cut {name}, a {type(module).__name__}: set tensor_parallel to 1.")


def require_even(config: ModelConfig, ranks: int) -> None:
    """Refuse sizes that cannot be cut.

    Raises:
        SettingError: names the size, and degrees that divide it.
    """
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = {"num_attention_heads": heads, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % ranks:
            possible = [degree for degree in range(1, heads + 1) if heads % degree == 0 == config.intermediate_size % degree]
            raise SettingError(f"parallel.tensor_parallel {ranks} does not divide {name} {size}: give one of {possible}, or another model.")
    if key_value_heads % ranks and ranks % key_value_heads:
        raise SettingError(
            f"parallel.tensor_parallel {ranks} and num_key_value_heads {key_value_heads}: one must divide the other, so that each rank has "
            "whole heads, or each head a number of ranks."
        )
    if config.vocab_size < ranks:
        raise SettingError(f"A vocabulary of {config.vocab_size} tokens cannot be cut over {ranks} ranks.")
