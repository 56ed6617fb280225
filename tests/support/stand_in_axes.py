"""Stand-ins for the axes of chapters 07 to 09, as small as can be and right: they show that floor 6 carries axes that it does not know.

Tensor: the feed-forward layer's matrices cut over tp (columns, then rows), its norm's gradient partial. Pipeline: two stages, one
micro-batch after the other, perhaps a tied embedding at both ends. Expert: one matrix for each rank of ep, rows of all ranks through each.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.sharding import split_dimension
from shared.model.transformer import keep_part
from shared.parallel.comm.communicator import Communicator
from shared.parallel.data.engine import DataEngine
from shared.parallel.mesh import Axis, Mesh
from shared.totals import Totals, add_totals


class SumBackward(torch.autograd.Function):
    """The identity, whose gradient is summed over a group: what comes before ranks that each compute a part."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Communicator) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous().clone()
        ctx.group.all_reduce(gradient)
        return gradient, None


class SumForward(torch.autograd.Function):
    """The sum over a group, whose gradient is the identity: what comes after ranks that each computed a part."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Communicator) -> Tensor:
        x = x.contiguous().clone()
        group.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def shard(module: nn.Module, name: str, dimension: int, group: Communicator) -> nn.Parameter:
    """Replace a module's parameter by this rank's slice of it."""
    whole = getattr(module, name)
    size = whole.shape[dimension] // group.size
    sharding = split_dimension(whole, dimension, [(rank * size, (rank + 1) * size) for rank in range(group.size)], group)
    part = nn.Parameter(sharding.local(whole.detach()).clone(), requires_grad=whole.requires_grad)
    part.sharding = sharding
    setattr(module, name, part)
    return part


class TensorStandIn(Axis):
    brings = ("tensor_parallel",)

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        group = mesh.tp
        if group.size == 1:
            return
        for block in model.stack.blocks.values():
            layer = block.feed_forward
            for linear, dimension in ((layer.gate_proj, 0), (layer.up_proj, 0), (layer.down_proj, 1)):
                shard(linear, "weight", dimension, group)
            layer.down_proj.register_forward_hook(lambda module, inputs, output: SumForward.apply(output, group))
            # In front of the norm and not behind it, so that the norm's own gradient is partial, as under sequence parallelism.
            block.feed_forward_norm.register_forward_pre_hook(lambda module, inputs: SumBackward.apply(inputs[0], group))
            block.feed_forward_norm.weight.partial_over = group


class PipelineStandIn(Axis):
    brings = ("pipeline_parallel",)

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.pp.size == 1:
            return
        count, first, last = len(model.stack.blocks), mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
        share = -(-count // mesh.pp.size)
        keep_part(model, range(mesh.pp.rank * share, min(count, (mesh.pp.rank + 1) * share)), embedding=first, head=last)
        if model.config.tie_word_embeddings:
            (model.embedding.tokens if first else model.head.linear).weight.partial_over = mesh.pp

    def engine(self, model: nn.Module, mesh: Mesh) -> DataEngine | None:
        return TwoStages(model, mesh) if mesh.pp.size > 1 else None


class TwoStages(DataEngine):
    """Runs each micro-batch through both stages, forward and backward, before the next one."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        super().__init__(model, mesh.loss)
        self.pp, self.optim_params = mesh.pp, nn.Module()

    def runner(self, runner):
        def run(model, microbatches, objective) -> Totals:
            totals = add_totals([self.run_one(microbatch, objective) for microbatch in microbatches])
            for tensor in (totals.loss_sum, totals.token_count, *totals.metrics.values()):
                self.pp.broadcast(tensor, root=1)
            return totals

        return run

    def run_one(self, batch, objective) -> Totals:
        dtype, width = next(self.model.parameters()).dtype, self.model.config.hidden_size
        if self.pp.rank == 0:
            hidden = self.model(batch["input_ids"])
            self.pp.send(hidden.detach().contiguous(), to=1)
            gradient = torch.empty_like(hidden)
            self.pp.receive(gradient, source=1)
            hidden.backward(gradient)
            return Totals(torch.zeros((), dtype=dtype), torch.zeros((), dtype=torch.int64), {"correct": torch.zeros((), dtype=torch.int64)})
        hidden = torch.empty(*batch["input_ids"].shape, width, dtype=dtype)
        self.pp.receive(hidden, source=0)
        hidden.requires_grad_()
        totals = objective(LastStage(self.model, hidden), batch)
        totals.loss_sum.backward()
        self.pp.send(hidden.grad.contiguous(), to=0)
        return totals


class LastStage(nn.Module):
    """What an objective calls on the last stage: token ids are replaced by the hidden states of the stage before."""

    def __init__(self, model: nn.Module, hidden: Tensor):
        super().__init__()
        self.inner = [model, hidden]

    def forward(self, ids: Tensor, **options):
        model, hidden = self.inner
        return model(hidden, **options)


class AllRows(torch.autograd.Function):
    """The rows of all ranks, one after the other; each rank's gradient is the sum of what all ranks have for its rows."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Communicator) -> Tensor:
        ctx.group = group
        whole = x.new_empty(group.size, *x.shape)
        group.all_gather(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor):
        part = torch.empty_like(gradient[0])
        ctx.group.reduce_scatter(part, gradient.contiguous())
        return part, None


class OwnRows(torch.autograd.Function):
    """The sum over the ranks of this rank's rows; the gradient goes to all ranks."""

    @staticmethod
    def forward(ctx, whole: Tensor, group: Communicator) -> Tensor:
        ctx.group = group
        part = torch.empty_like(whole[0])
        group.reduce_scatter(part, whole.contiguous())
        return part

    @staticmethod
    def backward(ctx, gradient: Tensor):
        whole = gradient.new_empty(ctx.group.size, *gradient.shape)
        ctx.group.all_gather(whole, gradient.contiguous())
        return whole, None


class Experts(nn.Module):
    """A feed-forward layer plus all experts' answers, each times a weight that x itself decides: matrices [experts, out, in]."""

    def __init__(self, inner: nn.Module, size: int, count: int, dtype: torch.dtype):
        super().__init__()
        self.inner = inner
        generator = torch.Generator().manual_seed(11)
        values = torch.randn(count, size, size, generator=generator, dtype=torch.float64) / size
        self.experts = nn.Parameter(values.to(dtype))
        self.experts.role = "expert"
        self.group: Communicator | None = None

    def forward(self, x: Tensor) -> Tensor:
        everyone = x[None] if self.group is None else AllRows.apply(x, self.group)
        first = 0 if self.group is None else self.group.rank * len(self.experts)
        mixed = sum(torch.sigmoid(everyone[..., first + n : first + n + 1]) * F.linear(everyone, w) for n, w in enumerate(self.experts))
        return self.inner(x) + (mixed[0] if self.group is None else OwnRows.apply(mixed, self.group))


class ExpertStandIn(Axis):
    brings = ("expert_parallel",)

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        degree = mesh.config.expert_parallel
        if degree == 1:
            return
        grid = torch.arange(mesh.world.size).view(mesh.pp.size, -1, degree, mesh.tp.size)  # [pp, edp, ep, tp]
        ep = mesh.world.split("ep", grid.permute(0, 1, 3, 2).flatten(0, 2).tolist())
        edp = mesh.world.split("edp", grid.permute(0, 2, 3, 1).flatten(0, 2).tolist())
        for block in model.stack.blocks.values():
            layer = block.feed_forward
            part = shard(layer, "experts", 0, ep)
            part.role, part.shared_over, layer.group = "expert", edp, ep


def with_experts(model: nn.Module, count: int = 4) -> nn.Module:
    for block in model.stack.blocks.values():
        dtype = next(block.parameters()).dtype
        block.feed_forward = Experts(block.feed_forward, model.config.hidden_size, count, dtype)
    return model


def stand_ins() -> Sequence:
    return PipelineStandIn(), TensorStandIn(), ExpertStandIn()
