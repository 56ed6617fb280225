"""What each stage of a pipeline holds and sends in a training step, measured on thread ranks beside the formulas.

python tests/tables/pipeline_cost_table.py         the tables of chapter 08's page
python tests/tables/pipeline_cost_table.py cpu     the CPU seconds of a step in processes, which other programs change little
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
from memory_table import ADAMW, KINDS, RECOMPUTE, ROWS, SMALL, batch, cell, memory_measured  # noqa: E402

from shared.loop import accumulate_gradients, train_step # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout # noqa: E402
from shared.parallel.data.fsdp import FullySharded  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.pipeline.runner import PipelineRunner  # noqa: E402
from shared.parallel.pipeline.schedules import Action, bubble_fraction, make_schedule # noqa: E402
from shared.parallel.pipeline.simulate import make_timeline, validate  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes # noqa: E402
from shared.parallel.planning.pipeline_costs import estimate_ranks, step_exchanges # noqa: E402
from shared.parallel.processes.launch import run_processes  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402


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
        held |= {("left", *key): [each for _, wait in waiting for each in wait.args] for key, waiting in self.runner.left.items()}
        for key in held.keys() - self.kept.keys():
            self.kept[key] = held[key]
            for tensor in held[key]:
                self.activations.count(tensor, 1)
        for key in self.kept.keys() - held.keys():
            for tensor in self.kept.pop(key):
                self.activations.count(tensor, -1)

    def note_gradients(self, *_: Any) -> None:
        """After each action; those of the last part W, and of fsdp's root unit, are complete when the step begins."""
        sharded = [engine for engine in self.parallel.engines if isinstance(engine, FullySharded)]
        unreduced = [each for engine in sharded for unit in engine.units for flat in unit.flats for each in flat.unreduced]
        here = memory_measured.gradient_bytes(self.parameters) + memory_measured.storage_bytes(unreduced)
        self.gradients = max(self.gradients, here)

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


def near(measured: float, predicted: float) -> bool:
    return abs(measured - predicted) <= 0.05 * predicted


def layout_of(word: str, schedule: str, recompute: str = "none") -> ParallelConfig:
    """`_keep` at the end of the word: fully sharded weights are gathered once a step."""
    layout = replace(parse_layout(word.removesuffix("_keep")), reshard_after_forward=not word.endswith("_keep"))
    chunks = 2 if schedule == "interleaved" else 1
    return replace(layout, pipeline_schedule=schedule, pipeline_chunks=chunks, activation_checkpointing=recompute)


# The tables.

STEP = StepSizes(ROWS, 48, 4)
TIED = replace(SMALL, tie_word_embeddings=True)
SHOWN = [
    *(("pp2", schedule, "none") for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")), ("pp2", "1f1b", "full"),
    *(("pp4", schedule, "none") for schedule in ("gpipe", "1f1b", "zero_bubble")),
    ("dp2_pp2", "1f1b", "none"), ("fsdp2_pp2", "1f1b", "none"), ("pp2_tp2", "1f1b", "none"),
]  # fmt: skip
WITH_MESSAGES = (("pp2", "interleaved"), ("pp4", "1f1b"), ("fsdp2_pp2", "1f1b"), ("pp2_tp2", "1f1b"))


def memory_and_messages() -> Iterator[str]:
    """Two tables, of each stage: what it holds, on the rank that is farthest from what is predicted; and what it sends and receives."""
    messages = ["", "| layout | schedule | rank of the pipeline | operation | calls | bytes of the tensors |", "|---|---|---|---|---|---|"]
    yield f"| layout | schedule | recomputed | rank of the pipeline | {' | '.join(KINDS.values())} |"
    yield "|" + "---|" * (4 + len(KINDS))
    for word, schedule, how in SHOWN:
        layout = layout_of(word, schedule, how)
        predicted, found = estimate_ranks(TIED, layout, ADAMW, STEP), by_rank(layout, STEP, TIED)
        size = layout.ranks // layout.pipeline_parallel
        for stage, expected in enumerate(predicted):
            own, cells = found[stage * size : (stage + 1) * size], []
            for kind in KINDS:
                aim = getattr(expected, kind)
                cells.append(cell(aim, max((getattr(held, kind) for held, _ in own), key=lambda value: abs(value - aim))))  # noqa: B023
            yield f"| {word} | {schedule} | {RECOMPUTE[how]} | {stage} | {' | '.join(cells)} |"
            trace = own[0][1]
            for key, (calls, sent) in predicted_exchanges(layout, stage).items() if (word, schedule) in WITH_MESSAGES else ():
                cells = f"{calls:g} / {trace.calls()[key]:g} | {cell(sent, trace.bytes()[key])}"
                messages.append(f"| {word} | {schedule} | {stage} | {key[0]} over {key[1]} | {cells} |")
    yield from messages


def predicted_exchanges(layout: ParallelConfig, stage: int) -> dict[tuple[str, str], tuple[float, float]]:
    """(operation, axis) -> calls and bytes of a step."""
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in step_exchanges(TIED, layout, ADAMW, STEP, stage):
        calls[each.operation, each.axis] += each.calls
        sizes[each.operation, each.axis] += each.calls * each.bytes
    return {key: (calls[key], sizes[key]) for key in sorted(calls)}


def schedules_table() -> Iterator[str]:
    """By schedule, the micro-batches in flight on each rank, and the bubble of equal stages, of the time computed."""
    yield "| schedule | ranks p | chunks v | micro-batches m | in flight, by rank | bubble, simulated | by formula |"
    yield "|---|---|---|---|---|---|---|"
    for ranks, microbatches in ((2, 4), (4, 4), (4, 8), (4, 32), (8, 32)):
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)):
            schedule = make_schedule(name, ranks, microbatches, chunks)
            marks = [mark / chunks for mark in validate(schedule, microbatches, chunks)]
            bubble = make_timeline(schedule, microbatches, chunks).bubble()
            formula = (ranks - 1) / (3 * microbatches) if name == "zero_bubble" else bubble_fraction(ranks, microbatches, chunks)
            row = ", ".join(f"{mark:g}" for mark in marks)
            yield f"| {name} | {ranks} | {chunks} | {microbatches} | {row} | {bubble:.4f} | {formula:.4f} |"


WIDE = ModelConfig(vocab_size=509, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=688)


def cpu_seconds(world: Communicator, layout: ParallelConfig, steps: int = 8) -> float:
    """Of this rank's process, in the median of several steps."""
    parallel = apply_parallel(TransformerModel(WIDE), Mesh(layout, world), ADAMW, axes=RUN_AXES)
    stepper = build_optimizer(parallel.optim_params, ADAMW)
    runner, updater, taken = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm)), []
    for _ in range(steps):
        began, batches = time.process_time(), [batch(4, 128) for _ in range(8)]
        train_step(parallel.model, stepper, batches, packed_next_token_objective, runner, parallel.reducer, updater)
        taken.append(time.process_time() - began)
    return sorted(taken)[steps // 2]


def cpu_table() -> Iterator[str]:
    yield "| layout, schedule | CPU seconds of a step, by rank | of all ranks together |"
    yield "|---|---|---|"
    for word, schedule in (("one", "1f1b"), *(("pp2", name) for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"))):
        layout = layout_of(word, schedule)
        found = run_processes(cpu_seconds, layout.ranks, layout, timeout=600)
        yield f"| {word}{', ' + schedule if word != 'one' else ''} | {', '.join(f'{each:.2f}' for each in found)} | {sum(found):.2f} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in cpu_table() if sys.argv[1:] == ["cpu"] else chain(memory_and_messages(), [""], schedules_table()):
        print(line, flush=True)
