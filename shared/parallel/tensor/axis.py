"""Chapter 07. Tensor parallelism as an axis of the mesh: shards a plain transformer's matrices over ranks, in place (Megatron-LM).

    attention      q, k, v by columns (whole heads)    o by rows         feed-forward    gate, up by columns    down by rows
    embedding      by tokens                           head by tokens

Each rank computes its heads and its inner features from the same input: f comes before a sublayer, g after its last matrix. Replicated
parameters (norms, biases of rows) are used alike on every rank, so each has their full gradient.

Extension points of later chapters: a sublayer or head with a method `over_ranks(group, leave)` sums its parts itself, with `leave`; a layer
with `knows_tensor_parallelism` calls its `combine` itself; a layer that stores its weight in another form has `cut_weight(dimension,
ranges, group)`, called in place of sharding the parameter `weight`, with `weight_shape` and the names of its parameters (`stored`). Stacks
of matrices [E, out, in] are sharded matrix by matrix.

With sequence parallelism the residual stream between the sublayers is sharded along the sequence, and so are norms, dropout and what they
save for backward. Replicated parameters then see this rank's positions only, and their gradients are summed over the ranks
(`partial_over`).

Left out on purpose: layers that this file does not know, which are refused: training them would silently give wrong results.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.attention import Attention
from shared.model.block import Block, Stack
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, to_compute_dtype
from shared.model.embedding import Embedding, Head
from shared.model.feed_forward import FeedForward, GatedFeedForward
from shared.model.sharding import Range, cut_parameter
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Axis, Mesh
from shared.parallel.tensor.layers import RowLinear, ShardDropout, VocabularyEmbedding, VocabularyHead, attend_with_own_dropout
from shared.parallel.tensor.operators import f_and_g, gather_sequence, join_sequence, scatter_sequence, split_sequence
from shared.parallel.tensor.shards import gradient_sums, tensor_shards


class TensorParallel(Axis):
    """Tensor and sequence parallelism."""

    brings = ("tensor_parallel", "sequence_parallel")

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.tp.size == 1:
            return
        require_known(model)
        require_even(model.config, mesh.tp.size, mesh.config.backend)
        if mesh.config.backend == "torch":  # which takes seconds to import
            require_plain(model)
            from shared.parallel.tensor.on_torch import parallelize_by_torch

            parallelize_by_torch(model, mesh)
            return
        Cutter(mesh, model.config.num_key_value_heads).cut_model(model)


class Cutter:
    """Shards a model's modules over tp. copies: the ranks with the same key-value head, where there are fewer heads than ranks."""

    def __init__(self, mesh: Mesh, key_value_heads: int):
        self.group, self.by_sequence = mesh.tp, mesh.config.sequence_parallel
        self.copies: Communicator | None = None
        if mesh.tp.size > key_value_heads:
            ranks = torch.arange(mesh.world.size).view(-1, mesh.tp.size // key_value_heads)  # tp is the mesh's innermost axis
            self.copies = mesh.world.split("tp_copies", ranks.tolist())
        self.f, self.g = f_and_g(mesh.tp)
        self.enter = partial(gather_sequence, group=mesh.tp) if self.by_sequence else self.f
        self.leave = partial(scatter_sequence, group=mesh.tp) if self.by_sequence else self.g

    def cut_model(self, model: TransformerModel) -> None:
        vocabulary = model.head is not None and not hasattr(model.head, "over_ranks")
        tied = model.embedding is not None and vocabulary and model.head.linear.weight is model.embedding.tokens.weight
        self.cut_parameters(model)
        if tied:
            model.head.linear.weight = model.embedding.tokens.weight
        if model.embedding is not None:
            tokens = model.embedding.tokens
            first = tokens.weight.sharding.here.offsets[0]
            tokens.first, tokens.combine = first, self.g
            if type(tokens) is nn.Embedding:
                tokens.__class__ = VocabularyEmbedding
        if vocabulary:
            sizes = [box.sizes[0] for box in model.head.linear.weight.sharding.parts]
            model.head.__class__, model.head.group, model.head.sizes = VocabularyHead, self.group, sizes
        for module in () if model.head is None else model.head.modules():
            if hasattr(module, "over_ranks"):
                module.over_ranks(self.group, self.leave)
        for stack in filter(None, (model.encoder, model.stack)):
            self.change_stack(stack, lambda stack=stack: stack is model.encoder or model.head is not None)

    def cut_parameters(self, model: TransformerModel) -> None:
        """Replace each sharded parameter by this rank's slice, and set `partial_over` where gradients must be summed over ranks."""
        shapes = {name: tuple(parameter.shape[-2:]) for name, parameter in model.named_parameters()}
        packed = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "cut_weight")}
        for name, module in packed.items():
            shapes[name] = module.weight_shape
            for stored in module.stored:
                del shapes[f"{name.removesuffix('weight')}{stored}"]
        for name, (dimension, ranges) in tensor_shards(shapes, model.config.head_dim, self.group.size).items():
            module, _, attribute = name.rpartition(".")
            from_end = dimension - len(shapes[name])
            if name in packed:
                packed[name].cut_weight(from_end, ranges, self.group)
            else:
                self.cut(model.get_submodule(module), attribute, from_end, ranges)
        for name, over in gradient_sums(list(shapes), self.by_sequence, self.copies is not None).items():
            group = self.copies if over == "copies" else self.group
            if name in packed:
                packed[name].copies = group
            else:
                model.get_parameter(name).partial_over = group

    def cut(self, module: nn.Module, name: str, dimension: int, ranges: list[Range]) -> None:
        """Replace a parameter of a module by this rank's slice along a dimension, counted from the last one: -1."""
        cut_parameter(module, name, dimension % getattr(module, name).dim(), ranges, self.group)

    def change_stack(self, stack: Stack, is_last: Callable[[], bool]) -> None:
        """is_last: whether a sharded module follows the stack, as a head or cross-attention; after the other stages of a pipeline all ranks
        continue with the full stream."""
        if stack.config.position == "alibi":
            stack.position_bias = self.own_heads(stack.position_bias)
        for block in stack.blocks.values():
            self.change_block(block)
        if self.by_sequence:
            stack.run_block = self.splitting(stack.run_block, stack)
            stack.register_forward_hook(lambda module, inputs, x: (gather_sequence if is_last() else join_sequence)(x, self.group))
        else:
            stack.register_forward_hook(lambda module, inputs, x: self.f(x) if is_last() else x)

    def change_block(self, block: Block) -> None:
        sublayers = {block.attention: "o_proj", block.cross_attention: "o_proj", block.feed_forward: "down_proj"}
        for sublayer, last in sublayers.items():
            if sublayer is None:
                continue
            if hasattr(sublayer, "over_ranks"):
                sublayer.over_ranks(self.group, self.leave)
            else:
                linear = getattr(sublayer, last)
                linear.combine = self.leave
                if type(linear) is nn.Linear:
                    linear.__class__ = RowLinear
            # cast first, as the sublayer would: under autocast the gradient is then summed, or the stream gathered, in 16 bits
            sublayer.register_forward_pre_hook(lambda module, inputs: (self.enter(to_compute_dtype(inputs[0])), *inputs[1:]))
        for attention in filter(None, (block.attention, block.cross_attention)):
            if attention.dropout:
                attention.attend = attend_with_own_dropout(attention.attend, self.group.rank)
        if self.by_sequence and isinstance(block.dropout, nn.Dropout):
            block.dropout.__class__, block.dropout.group = ShardDropout, self.group

    def own_heads(self, bias: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """A position bias for this rank's heads."""
        return lambda queries, keys: bias(queries, keys).chunk(self.group.size, dim=1)[self.group.rank]

    def splitting(self, run_block: Callable[..., Tensor], stack: Stack) -> Callable[..., Tensor]:
        """Run blocks on this rank's positions: the stream is split before the first one."""

        def run(block: Block, x: Tensor, context: AttentionContext) -> Tensor:
            is_first = block is next(iter(stack.blocks.values()))
            return run_block(block, split_sequence(x, self.group) if is_first else x, context)

        return run


def require_known(model: nn.Module) -> None:
    """Refuse a model with modules that tensor parallelism does not know."""
    if type(model) is not TransformerModel:
        raise ValueError(f"Tensor parallelism cuts a TransformerModel, not a {type(model).__name__}.")
    kinds: dict[str, tuple[type, ...]] = {
        "embedding": (Embedding,), "head": (Head,), "attention": (Attention,), "cross_attention": (Attention,),
        "feed_forward": (FeedForward, GatedFeedForward), "tokens": (nn.Embedding,), "linear": (nn.Linear,),
    }  # fmt: skip
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        known = (nn.Linear,) if last.endswith("_proj") else kinds.get(last)
        if known and type(module) not in known and not getattr(module, "knows_tensor_parallelism", False):
            raise ValueError(f"Tensor parallelism does not know how to cut {name}, a {type(module).__name__}: set tensor_parallel to 1.")


def require_plain(model: nn.Module) -> None:
    """Refuse layers that store their weights in another form, which PyTorch's styles would not shard."""
    if packed := [name for name, module in model.named_modules() if hasattr(module, "cut_weight")]:
        raise SettingError(f"parallel.backend torch cannot cut the quantized weight of {packed[0]} (tensor_parallel): use backend course.")


def require_even(config: ModelConfig, ranks: int, backend: str = "course") -> None:
    """Refuse sizes that the degree does not divide."""
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
    if backend == "torch" and key_value_heads < ranks:
        raise SettingError(
            f"parallel.backend torch with tensor_parallel {ranks} and num_key_value_heads {key_value_heads}: PyTorch's ColwiseParallel "
            f"would cut within a head. Give a tensor_parallel of at most {key_value_heads}, or backend course, which repeats heads."
        )
    if ranks > 1 and config.qk_norm and config.qk_norm_over == "projection":
        raise SettingError("qk_norm_over projection normalises all heads together, and no rank has them: set tensor_parallel to 1.")
    if config.vocab_size < ranks:
        raise SettingError(f"A vocabulary of {config.vocab_size} tokens cannot be cut over {ranks} ranks.")
