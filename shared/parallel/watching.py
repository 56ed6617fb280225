"""Chapter 06. What chapter 04's callbacks must know where a run is spread: whole norms, all ranks' tokens, and who speaks.

Every rank measures what takes all of them (a norm over parts is an all-reduce, and so is a forward pass through weights that are cut), and
one rank tells. What only tells is rank 0's alone. Of a step that is stopped each rank keeps its own micro-batches.

Left out on purpose: profiles of the other ranks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shared.engine.debug.anomalies import CatchAnomalies
from shared.engine.callbacks import Callback
from shared.engine.debug.dump import ModelDump
from shared.engine.early_stopping import EarlyStopping
from shared.engine.metrics.throughput import Throughput
from shared.engine.metrics.norms import Norms
from shared.model.roles import Role, parameters_by_role
from shared.parallel.parallelize import Parallel
from shared.parallel.checkpoint.local_state import weights_on_rank_0
from shared.parallel.mesh import Mesh
from shared.parallel.sharding import norm_of_parts
from shared.parallel.health.replicas import ReplicaCheck, StepSaid
from shared.totals import Batch

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine

ON_EVERY_RANK = (CatchAnomalies, Norms, EarlyStopping, ModelDump)


class PieceNorms(Norms):
    """Norms by role of what a rank's optimizer holds. Where parameters are cut over ranks, the ranks' parts add, as squares.

    Args:
        parallel: whose pieces are measured, under the plain model's names, from which roles are read; where it is offloaded, those that the
            gradients come to.
    """

    def __init__(self, parallel: Parallel, like: Norms):
        groups = [cut.group for cut in parallel.cuts().values()]
        super().__init__(like.updates, partial(norm_of_parts, group=groups[0]) if groups else like.norm, like.loss_scale)
        self.parallel = parallel

    def roles(self, model: object) -> dict[Role, dict[str, Tensor]]:
        return parameters_by_role(self.parallel.optimized)

    def present(self, tensors: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """The roles that the model has: a rank that holds nothing of one measures it all the same, because the others wait for it."""
        named = self.roles(None)
        return {role: of_role for role, of_role in tensors.items() if named[role]}


class RankDump(ModelDump):
    """A rank's dumps: of its pieces, and of the modules inside DDP's wrapper. The other ranks than 0 dump a broken step only, in which all
    take part, since computing it again takes all of them.

    Args:
        parallel: whose pieces are dumped.
    """

    def __init__(self, parallel: Parallel, rank: int, like: ModelDump):
        super().__init__(like.every, like.on_anomaly, like.tensors, like.loss_scale, rank)
        self.parallel = parallel

    def on_batch(self, engine: "RuntimeEngine", microbatches: Sequence[Batch]) -> None:
        if self.rank == 0:
            super().on_batch(engine, microbatches)

    def parameters(self, engine: "RuntimeEngine") -> list[tuple[str, nn.Parameter]]:
        return list(self.parallel.optimized.named_parameters())

    def recording_of(self, model: nn.Module) -> ExitStack:
        return super().recording_of(getattr(model, "module", model))


def for_ranks(callbacks: list[Callback], parallel: Parallel, mesh: Mesh) -> list[Callback]:
    """Chapter 04's callbacks for this rank of a run that is spread, with the check that replicas are alike."""
    if mesh.world.size == 1:
        return callbacks
    parallel = getattr(parallel, "inner", parallel)  # of an optimizer that is elsewhere, what its gradients come from
    found: list[Callback] = [StepSaid(mesh.world.trace)]
    for callback in callbacks:
        if isinstance(callback, CatchAnomalies):
            callback.norm, callback.rank = lambda gradients: parallel.norm(parallel.optimized), mesh.world.rank
            callback.weights = lambda engine: weights_on_rank_0(parallel, mesh.world)
        if isinstance(callback, ModelDump):
            callback = RankDump(parallel, mesh.world.rank, callback)
        if isinstance(callback, Throughput):
            callback.replicas = mesh.data.size
            callback.peak_flops = callback.peak_flops and callback.peak_flops * mesh.world.size
        if isinstance(callback, Norms):
            callback = PieceNorms(parallel, callback)
        if mesh.world.rank == 0 or isinstance(callback, ON_EVERY_RANK):
            found.append(callback)
    weights = parallel.optimized if mesh.fsdp.size > 1 else getattr(parallel, "stored", parallel.model)
    return [*found, ReplicaCheck(weights, mesh.dp, mesh.config.check_every)] if mesh.config.check_every else found
