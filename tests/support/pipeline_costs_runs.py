"""What each stage of a pipeline holds and sends in a training step, measured on thread ranks: storages and trace entries."""

from typing import Any

import torch
from memory_table import ADAMW, ROWS, SMALL, batch, memory_measured

from shared.loop import accumulate_gradients, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.comm.trace import CommTrace
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.pipeline.schedules import Action
from shared.parallel.planning.memory import MemoryEstimate, StepSizes
from shared.trainer.axes import RUN_AXES


class PipelineTracker(memory_measured.MemoryTracker):
    """Measures a step of a pipeline's rank. Beside what autograd saves, its activations are the results from which backward passes
    start, and what part W needs."""

    def __init__(self, parallel: Any, optimizer: Any):
        super().__init__(parallel, optimizer)
        self.runner = next(engine for engine in parallel.engines if isinstance(engine, PipelineRunner))
        self.kept: dict[tuple, list[torch.Tensor]] = {}
        self.runner.forward = self.noting(self.runner.forward)
        self.runner.backward = self.noting(self.runner.backward)

    def noting(self, run: Any) -> Any:
        def with_notes(action: Action, *arguments: Any) -> None:
            self.count()
            run(action, *arguments)
            self.count()
            self.note_gradients()

        return with_notes

    def count(self) -> None:
        """Count what the runner has begun to keep, and no longer what it has freed."""
        held = {("result", *key): [result] for key, (_, result) in self.runner.graphs.items() if result.dim()}
        held |= {("left", *key): [each for _, *both in waiting for each in both] for key, waiting in self.runner.left.items()}
        for key in held.keys() - self.kept.keys():
            self.kept[key] = held[key]
            for tensor in held[key]:
                self.activations.count(tensor, 1)
        for key in self.kept.keys() - held.keys():
            for tensor in self.kept.pop(key):
                self.activations.count(tensor, -1)

    def note_gradients(self, *_: Any) -> None:
        """After each action; those of the last part W, and of fsdp's root unit, are complete when the step begins."""
        self.gradients = max(self.gradients, memory_measured.gradient_bytes(self.parameters))

    def before_step(self, *_: Any) -> None:
        self.note_gradients()


def measure(
    world: Communicator, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes, config: ModelConfig
) -> tuple[MemoryEstimate, CommTrace]:
    """What a rank holds of its first step, and what it communicates in its second one."""
    dtype = None if step.precision == "float32" else torch.bfloat16
    parallel = apply_parallel(TransformerModel(config), Mesh(layout, world), optimizer, dtype, axes=RUN_AXES)
    stepper, objective = build_optimizer(parallel.optim_params, optimizer), autocast_objective(packed_next_token_objective, step.precision)
    objective = parallel.objective(objective)
    runner, updater = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm))

    def one_step() -> None:
        batches = [batch(step.rows, step.seq) for _ in range(step.microbatches)]
        train_step(parallel.model, stepper, batches, objective, runner, parallel.reducer, updater)

    with PipelineTracker(parallel, stepper) as meter:
        one_step()
        meter.count()
    assert meter.activations.now == 0
    peak = meter.peak
    world.trace.clear()
    one_step()
    return peak, world.trace


def by_rank(
    layout: ParallelConfig, step: StepSizes, config: ModelConfig = SMALL, optimizer: OptimizerConfig = ADAMW
) -> list[tuple[MemoryEstimate, CommTrace]]:
    return run_threads(measure, layout.ranks, layout, optimizer, step, config)


STEP = StepSizes(ROWS, 48, 4)


def near(measured: float, predicted: float) -> bool:
    return abs(measured - predicted) <= 0.05 * predicted
