"""Bytes that a rank holds of a training step, measured beside what the formulas say, and the table of chapter 06's page.

python tests/tables/memory_table.py            one, two and four ranks
python tests/tables/memory_table.py 4          four ranks
python tests/tables/memory_table.py 07         the tables of chapter 07's page instead: what ranks hold, and what they send
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from shared.model.chunked_loss import packed_next_token_objective# noqa: E402
from shared.loop import accumulate_gradients, train_step  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, estimate_memory  # noqa: E402
from shared.parallel.planning.tensor_costs import context_exchanges, tensor_exchanges  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402

memory_measured = import_module("chapters.06_data_parallel.memory_measured")

SMALL = ModelConfig(vocab_size=509, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=172)
ADAMW = OptimizerConfig("adamw", lr=0.01)
ROWS, SEQ = 3, 37
MICROBATCHES = 2  # of the table: with a single one, gradients never wait whole under ZeRO-1
LAYOUTS = {
    1: {"one process": "one"},
    2: {"DDP": "dp2", "ZeRO-1": "dp2_zero1", "ZeRO-2": "dp2_zero2", "FSDP (ZeRO-3)": "fsdp2"},
    4: {"DDP": "dp4", "ZeRO-1": "dp4_zero1", "ZeRO-2": "dp4_zero2", "FSDP (ZeRO-3)": "fsdp4"},
}
OF_CHAPTER_07 = ("one", "tp2", "tp2_sp", "tp4", "tp4_sp", "cp2", "cp4", "cp2_tp2_sp", "fsdp2_tp2_sp")  # `_sp`: with sequence parallelism
SEQ_07 = 48  # which divides
RECOMPUTE = {"none": "no", "full": "blocks"}
KINDS = {
    "weights": "parameters", "gathered": "gathered", "gradients": "gradients", "optimizer": "optimizer state", "activations": "activations",
}  # fmt: skip


def batch(rows: int = ROWS, seq: int = SEQ) -> dict[str, torch.Tensor]:
    ids = torch.randint(SMALL.vocab_size, (rows, seq + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def measure(
    world: Communicator,
    layout: ParallelConfig,
    optimizer: OptimizerConfig,
    microbatches: int,
    precision: str,
    config: ModelConfig,
    seq: int,
) -> tuple[MemoryEstimate, CommTrace]:
    """What a rank holds of a step, and what it communicates."""
    dtype = None if precision == "float32" else torch.bfloat16
    parallel = apply_parallel(TransformerModel(config), Mesh(layout, world), optimizer, dtype, axes=RUN_AXES)
    world.trace.clear()
    stepper, objective = build_optimizer(parallel.optim_params, optimizer), autocast_objective(packed_next_token_objective, precision)
    objective = parallel.objective(objective)
    runner, updater = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm))
    with memory_measured.MemoryTracker(parallel, stepper) as meter:
        train_step(parallel.model, stepper, [batch(seq=seq) for _ in range(microbatches)], objective, runner, parallel.reducer, updater)
    assert meter.activations.now == 0
    return meter.peak, world.trace


def deviation(measured: float, predicted: float) -> float:
    """In per cent of what was predicted."""
    if not predicted:
        return math.inf if measured else 0.0
    return 100 * (measured - predicted) / predicted


def compared(
    layout: ParallelConfig, optimizer: OptimizerConfig = ADAMW, microbatches: int = 1, precision: str = "float32",
    config: ModelConfig = SMALL, seq: int = SEQ,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Kind of bytes -> predicted, and measured on the rank that is farthest from it."""
    predicted = estimate_memory(config, layout, optimizer, StepSizes(ROWS, seq, microbatches, precision))
    found = run_threads(measure, layout.ranks, layout, optimizer, microbatches, precision, config, seq)
    return {
        kind: (expected, max((getattr(of_rank, kind) for of_rank, _ in found), key=lambda value: abs(value - expected)))  # noqa: B023
        for kind, expected in vars(predicted).items()
    }


def cell(predicted: float, measured: float) -> str:
    if not predicted and not measured:
        return "none"
    return f"{predicted:,.0f} / {measured:,.0f} ({deviation(measured, predicted):+.2f} %)"


def table(asked: list[int]) -> Iterator[str]:
    """Line by line, in bytes, predicted / measured."""
    yield f"| ranks | layout | recomputed | {' | '.join(KINDS.values())} |"
    yield "|" + "---|" * (3 + len(KINDS))
    worst = 0.0
    for ranks in asked:
        for (name, word), how in product(LAYOUTS[ranks].items(), RECOMPUTE):
            kinds = compared(layout_of(word, how), microbatches=MICROBATCHES)
            worst = max(worst, *(abs(deviation(measured, predicted)) for predicted, measured in kinds.values()))
            yield f"| {ranks} | {name} | {RECOMPUTE[how]} | {' | '.join(cell(*kinds[kind]) for kind in KINDS)} |"
    yield ""
    yield f"The largest deviation: {worst:.2f} %."


def layout_of(word: str, recompute: str = "none") -> ParallelConfig:
    return replace(parse_layout(word), activation_checkpointing=recompute)


def tables_of_chapter_07() -> Iterator[str]:
    """What ranks hold, as in `table`; then the calls and bytes of a step by operation, predicted / measured."""
    yield f"| layout | recomputed | {' | '.join(KINDS.values())} |"
    yield "|" + "---|" * (2 + len(KINDS))
    for word, how in product(OF_CHAPTER_07, RECOMPUTE):
        kinds = compared(layout_of(word, how), microbatches=MICROBATCHES, seq=SEQ_07)
        yield f"| {word} | {RECOMPUTE[how]} | {' | '.join(cell(*kinds[kind]) for kind in KINDS)} |"
    yield ""
    yield "| layout | recomputed | operation | calls | bytes of the tensors |"
    yield "|---|---|---|---|---|"
    for word, how in product(OF_CHAPTER_07[1:], RECOMPUTE):
        for (operation, axis), (calls, sizes) in exchanged(layout_of(word, how)).items():
            of_calls = " / ".join(f"{count:g}" for count in calls)
            yield f"| {word} | {RECOMPUTE[how]} | {operation} over {axis} | {of_calls} | {cell(*sizes)} |"


def exchanged(layout: ParallelConfig) -> dict[tuple[str, str], tuple[tuple[float, float], tuple[float, float]]]:
    """(operation, axis) -> calls and bytes of a step, each predicted and measured as the ranks' mean."""
    step = StepSizes(ROWS, SEQ_07, MICROBATCHES)
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in [*tensor_exchanges(SMALL, layout, ADAMW, step), *context_exchanges(SMALL, layout, step)]:
        calls[each.operation, each.axis] += each.calls
        sizes[each.operation, each.axis] += each.calls * each.bytes
    traces = [trace for _, trace in run_threads(measure, layout.ranks, layout, ADAMW, MICROBATCHES, "float32", SMALL, SEQ_07)]
    mean = lambda counts: sum(counts) / layout.ranks  # noqa: E731
    return {
        key: ((calls[key], mean(trace.calls()[key] for trace in traces)), (sizes[key], mean(trace.bytes()[key] for trace in traces)))
        for key in sorted(calls)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    for line in tables_of_chapter_07() if asked == ["07"] else table([int(word) for word in asked] or list(LAYOUTS)):
        print(line, flush=True)
