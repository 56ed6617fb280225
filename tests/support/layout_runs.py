"""A small run on any layout, with its saver, for the tests of checkpoints and of parity over layouts."""

from pathlib import Path

import torch
from sharded_runs import MICROBATCHES, MUON, SMALL, batch_of, build, share, whole_gradient
from step_records import STEPS, RunRecord
from torch import Tensor

from shared.loop import accumulate_gradients, train_step
from shared.loss import next_token_objective
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.loss_scale import LossScaler
from shared.optim.updater import Update
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.checkpoint import RankSaver
from shared.totals import Batch


class LayoutRun:
    """One rank of a run. `step` counts the steps that are done, and is saved as a part, as a loader's position is."""

    def __init__(
        self, world: Communicator, layout: ParallelConfig, config=SMALL, optimizer: OptimizerConfig = MUON,
        objective=next_token_objective, microbatches: int = MICROBATCHES, batches=batch_of, computed_in: torch.dtype | None = None,
        seed: int = 0, scaler: LossScaler | None = None, axes=AXES, prepare=lambda model: model, **settings,
    ):  # fmt: skip
        self.world, self.mesh, self.config = world, Mesh(layout, world), config
        self.microbatches, self.batches = microbatches, batches
        self.plain = prepare(build(config, **settings))
        if seed:
            with torch.no_grad():
                for parameter in self.plain.parameters():
                    parameter.fill_(float(seed))
        self.parallel = apply_parallel(self.plain, self.mesh, optimizer, computed_in, axes=axes)
        self.objective = self.parallel.objective(objective)
        self.optimizer = build_optimizer(self.parallel.optim_params, optimizer, self.parallel.routes)
        self.update = Update(1.0, scaler, self.parallel.grad_norm)
        runner = self.parallel.runner(accumulate_gradients)
        self.runner = scaler.scaled(runner) if scaler else runner
        self.step = 0

    def train(self, steps: int) -> "LayoutRun":
        for _ in range(steps):
            self.totals = train_step(
                self.parallel.model, self.optimizer, self.shares(), self.objective,
                self.runner, self.parallel.reducer, self.parallel.updater(self.update),
            )  # fmt: skip
            self.step += 1
        return self

    def shares(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        batches, data = [self.batches(self.step, number, self.config) for number in range(self.microbatches)], self.mesh.data
        return [share(batch, data.rank, data.size) for batch in batches]

    def record(self) -> RunRecord:
        """Train for three steps; gradients and weights are whole."""
        record = RunRecord()
        for _ in range(STEPS):
            self.train(1)
            record.note(self.totals, self.update.gradient_norm, self.gradients())
        record.weights = self.weights()
        return record

    def gradients(self) -> dict[str, Tensor | None]:
        """Of the last step, of the mean loss, clipped; whole on every rank."""
        return {name: whole_gradient(shard) for name, shard in self.parallel.state.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Whole on every rank that holds a part of them; a pipeline's rank has its stage's alone."""
        return {name: tensor.clone() for name, tensor in self.parallel.whole_weights() if tensor is not None}

    def saver(self, folder: Path, **settings) -> RankSaver:
        return self.parallel.saver(folder, **settings)

    def save(self, folder: Path, **settings) -> Path:
        saver = self.saver(folder, **settings)
        saver.save(self.step, self.optimizer, {"loader": self}, {})
        try:
            return saver.finished(wait=True)
        finally:
            saver.close()

    def restore(self, folder: Path) -> "LayoutRun":
        self.saver(folder).restore(self.optimizer, {"loader": self})
        return self

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference over all tensors; infinite where one is missing on a side."""
    worst = 0.0
    for name in found.keys() | expected.keys():
        ours, theirs = found.get(name), expected.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return float("inf")
        ours, theirs = ours.detach(), theirs.detach()
        size = theirs.norm().clamp(min=torch.finfo(theirs.dtype).tiny)
        worst = max(worst, float((ours - theirs).norm() / size))
    return worst
