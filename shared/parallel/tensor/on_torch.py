"""Chapter 07. Tensor and sequence parallelism on PyTorch's own DTensor: `parallelize_module` with a plan of styles, and `loss_parallel`.

    q, k, v, gate, up, head     ColwiseParallel          attention, feed-forward    PrepareModuleInput: gathers the stream, once
    o, down, embedding          RowwiseParallel          norms                      SequenceParallel

A style makes a module's parameters DTensors, and sets the layouts of its inputs and outputs; DTensor then inserts the collectives, also of
gradients: a partial one is summed before it reaches its parameter.

Between two uses each shard is kept as a plain tensor with a `sharding`, as with backend course, and is wrapped in a DTensor while its
module computes. So DDP, ZeRO, `fully_shard`, optimizers and checkpoints treat it as any other parameter. (`fully_shard` on DTensors would
shard a column's rows into strides, which are no box of the full matrix.)

Left out on purpose: fewer key and value heads than ranks, of which a style would give each rank a part of a head; torch.compile; DTensor's
collectives in the communication trace, where they do not appear.
"""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from shared.course.errors import SettingError
from shared.loss import IGNORED
from shared.model.block import Block, Stack
from shared.model.embedding import Head, TargetScores
from shared.model.sharding import split_dimension
from shared.model.transformer import TransformerModel
from shared.parallel.data.shards_on_torch import chunk_ranges
from shared.parallel.mesh import Mesh
from shared.parallel.tensor.layers import ShardDropout, attend_with_own_dropout
from shared.parallel.tensor.operators import require_divisible


def parallelize_by_torch(model: TransformerModel, mesh: Mesh) -> None:
    """Shard a model over `mesh.tp`, in place, also one on the meta device. It is one that `TensorParallel` accepts."""
    for name, module in model.named_modules():
        if getattr(module, "needs_course_backend", False):
            kind = type(module).__name__
            raise SettingError(f"parallel.backend torch cannot cut {name}, a {kind}, over tensor ranks: use backend course.")
    by_sequence = mesh.config.sequence_parallel
    device_mesh = DeviceMesh.from_group(mesh.tp.torch_group, mesh.tp.process.device.type, mesh_dim_names=("tp",))
    before = dict(model.named_parameters())
    plan = {name: style for name, module in model.named_modules() if (style := style_of(name, by_sequence))}
    parallelize_module(model, device_mesh, plan, src_data_rank=None)  # every rank has the same weights: nothing is sent
    for module in list(model.modules()):
        keep_local(module, mesh)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        vars(parameter).update({fact: value for fact, value in vars(before[name]).items() if fact != "sharding"})
        parameter.requires_grad_(before[name].requires_grad)  # which some styles forget
    if model.head is not None:
        model.head.__class__, model.head.device_mesh = DTensorHead, device_mesh
    model.compile = refuse_to_compile
    for stack in filter(None, (model.encoder, model.stack)):
        shape_stack(stack, mesh, device_mesh)


def refuse_to_compile(**options: object) -> None:
    raise SettingError(
        "engine.compile with parallel.backend torch and tensor_parallel: no graph can hold parameters that are wrapped as each module "
        "computes. Set engine.compile to false, or use backend course."
    )


def style_of(name: str, by_sequence: bool) -> ParallelStyle | None:
    """The style of a module, by the last part of its name; None for a replicated one."""
    stream = Shard(1) if by_sequence else Replicate()
    match name.rpartition(".")[2]:
        case "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" | "linear":
            return ColwiseParallel()
        case "o_proj" | "down_proj":
            return RowwiseParallel(output_layouts=stream)
        case "tokens":
            return RowwiseParallel(input_layouts=Replicate())
        case "attention" | "cross_attention":
            return PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None))
        case "feed_forward":
            return PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        case "q_norm" | "k_norm":  # [batch, heads, seq, d] of this rank's heads: their dimension is the one that is cut
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        case "attention_norm" | "cross_attention_norm" | "feed_forward_norm" | "final_norm" if by_sequence:
            return SequenceParallel(use_local_output=True)
    return None


def keep_local(module: nn.Module, mesh: Mesh) -> None:
    """Replace a module's DTensors by local shards with a `sharding`, which are wrapped again while the module computes."""
    wrapped = {name: parameter for name, parameter in module.named_parameters(recurse=False) if isinstance(parameter, DTensor)}
    if not wrapped:
        return
    for name, parameter in wrapped.items():
        part = nn.Parameter(parameter.detach().to_local().clone())
        if parameter.placements[0].is_shard():
            dimension = parameter.placements[0].dim
            part.sharding = split_dimension(parameter, dimension, chunk_ranges(parameter.shape[dimension], mesh.tp.size), mesh.tp)
        module.register_parameter(name, part)
    layouts = {name: (each.device_mesh, each.placements, each.shape, each.stride()) for name, each in wrapped.items()}
    compute = module.forward

    def forward(*inputs: Tensor) -> Tensor:
        parts = dict(module._parameters)
        module._parameters.update({name: as_dtensor(parts[name], *layout) for name, layout in layouts.items()})
        try:
            return compute(*inputs)
        finally:
            module._parameters.update(parts)

    module.forward = forward


def as_dtensor(part: Tensor, device_mesh: DeviceMesh, placements: tuple, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """A local shard as a DTensor, whose backward pass sums a partial gradient over the ranks."""
    return DTensor.from_local(part, device_mesh, placements, run_check=False, shape=shape, stride=stride)


def shape_stack(stack: Stack, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """Set what no style covers: position biases and dropout of this rank's heads, and sequence parallelism of the stream."""

    def between(x: Tensor, before: Replicate | Shard, after: Replicate | Shard) -> Tensor:
        return DTensor.from_local(x, device_mesh, [before], run_check=False).redistribute(placements=[after]).to_local()

    position_bias, run_block = stack.position_bias, stack.run_block
    first = next(iter(stack.blocks.values()))

    def bias_of_own_heads(queries: Tensor, keys: Tensor) -> Tensor | None:
        bias = position_bias(queries, keys)
        return bias if bias is None else between(bias, Replicate(), Shard(1))

    def split_then_run(block: Block, x: Tensor, context) -> Tensor:
        if block is first:
            require_divisible(x.shape[1], mesh.tp.size)
            x = between(x, Replicate(), Shard(1))
        return run_block(block, x, context)

    stack.position_bias = bias_of_own_heads
    for block in stack.blocks.values():
        for attention in filter(None, (block.attention, block.cross_attention)):
            if attention.dropout:
                attention.attend = attend_with_own_dropout(attention.attend, mesh.tp.rank)
        block.compile = refuse_to_compile
        if mesh.config.sequence_parallel and isinstance(block.dropout, nn.Dropout):
            block.dropout.__class__, block.dropout.group = ShardDropout, mesh.tp
    if mesh.config.sequence_parallel:
        stack.run_block = split_then_run
        stack.register_forward_hook(lambda module, inputs, x: between(x, Shard(1), Replicate()))


class DTensorHead(Head):
    """A vocabulary-parallel head, whose logits are wrapped in a DTensor for the loss."""

    device_mesh: DeviceMesh

    def scores(self, logits: Tensor, targets: Tensor) -> TargetScores:
        return DTensorScores(logits, targets, self.wrapped)

    def whole_logits(self, logits: Tensor) -> Tensor:
        return self.wrapped(logits).full_tensor()

    def wrapped(self, logits: Tensor) -> DTensor:
        """[..., vocab of this rank] -> [..., vocab]."""
        shape = torch.Size((*logits.shape[:-1], self.vocab_size))
        stride = torch.empty(shape, device="meta").stride()
        return as_dtensor(logits, self.device_mesh, (Shard(logits.dim() - 1),), shape, stride)


class DTensorScores(TargetScores):
    """Cross-entropy under `loss_parallel`. logits: [rows, vocab of this rank]. wrapped: makes them a DTensor [rows, vocab]."""

    def __init__(self, logits: Tensor, targets: Tensor, wrapped: Callable[[Tensor], DTensor]):
        super().__init__(logits, targets)
        self.wrapped = wrapped

    @cached_property
    def losses(self) -> tuple[Tensor, Tensor]:
        """The loss of each target, and the gradient of their sum."""
        with torch.enable_grad(), loss_parallel():
            leaf = self.logits.detach().requires_grad_()
            losses = F.cross_entropy(self.wrapped(leaf).to(self.dtype), self.targets, ignore_index=IGNORED, reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach().full_tensor(), gradient

    def cross_entropy(self) -> tuple[Tensor, Tensor]:
        return self.losses[0].sum(), self.counted.sum()

    def token_losses(self) -> Tensor:
        return self.losses[0]

    def gradient(self) -> Tensor:
        return self.losses[1]

    def count_correct(self) -> Tensor:
        logits = self.wrapped(self.logits.detach())
        places = DTensor.from_local(self.targets.where(self.counted, 0).unsqueeze(-1), logits.device_mesh, [Replicate()], run_check=False)
        chosen = logits.gather(-1, places).full_tensor().squeeze(-1)
        return (self.counted & (chosen == logits.amax(dim=-1).full_tensor())).sum()
