"""What each rank keeps in a training step, measured beside the formulas, on every layout of the covering set of chapter 09's PARITY.md.

python tests/parity/memory_products.py           print the table of chapter 12's MEMORY.md
python tests/parity/memory_products.py --write   write the page
"""

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "tables", "moe", "parity")]

import torch  # noqa: E402
import torch.utils.checkpoint as recomputing  # noqa: E402
from expert_cost_table import batches_of  # noqa: E402
from memory_table import ADAMW, SMALL, deviation, memory_measured
from memory_table import cell as cell_of  # noqa: E402
from pipeline_cost_table import PipelineTracker  # noqa: E402
from products import Case, case_of  # noqa: E402
from test_09_products import COVERING  # noqa: E402

from shared.course.paths import CHECKOUT  # noqa: E402
from shared.loop import accumulate_gradients, train_step  # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.moe.builders import MIXTURE  # noqa: E402
from shared.moe.config import MixtureConfig, MixtureModelConfig  # noqa: E402
from shared.moe.layer import mixture_layers  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.config import ParallelConfig  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.planning.data_costs import data_exchanges, norm_exchange, weights_of  # noqa: E402
from shared.parallel.planning.expert_costs import expert_exchanges  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes  # noqa: E402
from shared.parallel.planning.pipeline_costs import estimate_ranks, held_parts, step_exchanges  # noqa: E402
from shared.parallel.planning.tensor_costs import context_exchanges  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402

PAGE = CHECKOUT / "chapters" / "12_grpo" / "MEMORY.md"
DENSE = MixtureModelConfig(**vars(replace(SMALL, vocab_size=512, num_key_value_heads=2, tie_word_embeddings=True)))
EXPERTS = MixtureConfig(
    8, 48, scoring="sigmoid", balance_coefficient=0.3, z_coefficient=0.05, bias_update_rate=0.02, num_shared_experts=1, first_k_dense=1
)
MODELS = {"dense": DENSE, "experts": replace(DENSE, experts=EXPERTS)}
OPTIMIZERS = {"adamw": ADAMW, "muon": OptimizerConfig("muon", lr=0.01)}
STEP = StepSizes(3, 48, 2)
WITHIN = 0.05
KINDS = ("weights", "gathered", "gradients", "optimizer", "activations")


class SelectiveMeter(memory_measured.ActivationMeter):
    """Counts also what PyTorch's selective recomputation keeps: results in its cache, and what the second forward pass computes again."""

    of_thread: dict[int, "SelectiveMeter"] = {}

    def __enter__(self) -> "SelectiveMeter":
        self.of_thread[threading.get_ident()] = self
        self.hooks.__enter__()
        return self

    @classmethod
    def here(cls) -> "SelectiveMeter":
        return cls.of_thread[threading.get_ident()]

    def count(self, tensor: torch.Tensor, step: int) -> None:
        if tensor.layout is torch.strided:
            super().count(tensor, step)
            return
        self.now += step * tensor.nbytes  # oneDNN's own layout, which has no storage and no views
        self.peak = max(self.peak, self.now)


class CountedResult(recomputing._VersionWrapper):
    """A result in the cache, for as long as it is there."""

    def __init__(self, value: Any):
        super().__init__(value)
        if isinstance(value, torch.Tensor):
            self.saved = memory_measured.SavedTensor(value, SelectiveMeter.here())


class CountedRecomputation(recomputing._recomputation_hook):
    """Tensors that a second forward pass saves, each until its backward pass has used it."""

    def __init__(self, frame_of: Any, group: Any):
        super().__init__(frame_of, group)
        pack = self.pack_hook

        def counting(tensor: torch.Tensor) -> torch.Tensor:
            frame = frame_of()
            number = frame.recomp_counter[group]
            try:
                return pack(tensor)
            finally:
                holder = frame.weak_holders[number]() if number < len(frame.weak_holders) else None
                if holder is not None:
                    holder.handles[group].saved = SelectiveMeter.here().pack(tensor)

        self.pack_hook = counting


class Kept(NamedTuple):
    """By a rank. held: bytes by kind. trace: of what it communicates in a step. imbalance: rows of its experts, in shares of an equal
    number."""

    held: MemoryEstimate
    trace: CommTrace
    imbalance: float


def measure(world: Communicator, layout: ParallelConfig, optimizer: OptimizerConfig, config: MixtureModelConfig) -> Kept:
    """Of a rank's first step."""
    arriving: list[int] = []
    model, mesh = TransformerModel(config, MIXTURE), Mesh(layout, world)
    for layer in mixture_layers(model):
        layer.experts.up_proj.register_forward_hook(lambda module, inputs, output: arriving.append(len(output)))
    parallel = apply_parallel(model, mesh, optimizer, axes=RUN_AXES)
    stepper = build_optimizer(parallel.optim_params, optimizer, parallel.routes)
    runner, updater = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm))
    tracker = (PipelineTracker if layout.pipeline_parallel > 1 else memory_measured.MemoryTracker)(parallel, stepper)
    tracker.activations = SelectiveMeter(parallel.module)
    world.trace.clear()
    with tracker:
        objective, batches = parallel.objective(packed_next_token_objective), batches_of(mesh.data.rank, STEP)
        train_step(parallel.model, stepper, batches, objective, runner, parallel.reducer, updater)
    equal = STEP.rows * STEP.seq // layout.context_parallel * EXPERTS.num_experts_per_tok * len(arriving)
    return Kept(tracker.peak, world.trace, sum(arriving) / equal if layout.expert_parallel > 1 else 1.0)


def on_ranks(case: Case) -> list[Kept]:
    cell, optimizer = case
    arguments = cell.parallel(), OPTIMIZERS[optimizer], MODELS[cell.model]
    with patch.object(recomputing, "_VersionWrapper", CountedResult), \
            patch.object(recomputing, "_recomputation_hook", CountedRecomputation):  # fmt: skip
        return [measure(SingleRankCommunicator(), *arguments)] if cell.ranks == 1 else run_threads(measure, cell.ranks, *arguments)


def compared(case: Case, found: list[Kept]) -> dict[str, tuple[float, float]]:
    """Kind of bytes -> predicted, and measured on the rank that is farthest from it. Of Muon's state under ZeRO the ranks' mean: whole
    matrices are shared out, and some ranks get more of them. `sum`: of all kinds on one rank."""
    cell, optimizer = case
    layout, pairs = cell.parallel(), {kind: [] for kind in (*KINDS, "sum")}
    for rank, kept in enumerate(found):
        stages = estimate_ranks(MODELS[cell.model], layout, OPTIMIZERS[optimizer], replace(STEP, imbalance=kept.imbalance))
        expected = stages[rank * len(stages) // layout.ranks]
        for kind in KINDS:
            pairs[kind].append((getattr(expected, kind), getattr(kept.held, kind)))
        pairs["sum"].append((expected.total, kept.held.total))
    if optimizer == "muon" and layout.zero:
        pairs["optimizer"] = [tuple(sum(each) / len(found) for each in zip(*pairs["optimizer"], strict=True))]
    return {kind: max(of_ranks, key=lambda both: abs(deviation(both[1], both[0]))) for kind, of_ranks in pairs.items()}


def exchanged(case: Case, found: list[Kept]) -> list[tuple[dict, dict]]:
    """By stage of a pipeline, (operation, axis) -> calls and bytes of a step, predicted and traced, as means of its ranks. What a ring
    receives is what it sends."""
    cell, optimizer = case
    layout, config, each_stage = cell.parallel(), MODELS[cell.model], []
    size = layout.ranks // layout.pipeline_parallel
    for stage, part in enumerate(held_parts(config, layout)):
        predicted, traced, weights = Counter[tuple](), Counter[tuple](), weights_of(config, layout, part)
        for kept in found[stage * size : (stage + 1) * size]:
            step = replace(STEP, imbalance=kept.imbalance)
            for each in (
                *data_exchanges(weights, layout, step, optimizer == "muon", stage=stage), *norm_exchange(layout),
                *step_exchanges(config, layout, OPTIMIZERS[optimizer], step, stage), *context_exchanges(config, layout, step, part),
                *expert_exchanges(config, layout, step, part),
            ):  # fmt: skip
                predicted.update({(each.operation, each.axis, "calls"): each.calls / size})
                predicted.update({(each.operation, each.axis, "bytes"): each.calls * each.bytes / size})
            for what, counts in (("calls", kept.trace.calls()), ("bytes", kept.trace.bytes())):
                traced.update({(*key, what): count / size for key, count in counts.items() if key != ("receive", "cp")})
        each_stage.append((dict(predicted), dict(traced)))
    return each_stage


def table() -> Iterator[str]:
    yield f"| layout | model | recomputed | optimizer | {' | '.join(NAMES)} |"
    yield "|" + "---|" * (4 + len(NAMES))
    worst = 0.0
    for line in COVERING:
        case = case_of(line)
        kinds = compared(case, on_ranks(case))
        worst = max(worst, *(abs(deviation(measured, predicted)) for predicted, measured in kinds.values()))
        yield f"| {' | '.join(line.split())} | {' | '.join(cell_of(*kinds[kind]) for kind in NAMES.values())} |"
    yield ""
    yield f"The largest deviation: {worst:.1f} %."


NAMES = {
    "weights": "weights", "gathered": "gathered", "gradients": "gradients", "state": "optimizer", "activations": "activations",
    "sum": "sum",
}  # fmt: skip
TEXT = """\
# What a rank holds, predicted and measured

`python tests/parity/memory_products.py --write` writes this page (a minute on two cores). The layouts are those of the covering set of
[chapter 09's parity table](../09_mixture_of_experts/PARITY.md), in which every three facts that are allowed together meet: axes, sequence
parallelism, ZeRO's stage, model, recomputation, optimizer. Predictions are the formulas of `shared.parallel.planning`, by which `course
plan` and the refusal of a run that cannot fit reckon; they see the configuration, and of experts spread over ranks the number of rows that
arrived. Calls and bytes of what is sent are the ledger's exactly, with AdamW; Muon's gathers of matrices are means where they are cut
unevenly, and those of experts over their ranks have no formula.

Measured are storages behind tensors on thread ranks, each once, in a first step of two micro-batches of 3 rows of 48 tokens: predicted /
measured bytes, on the rank that is farthest from its prediction. `tests/parity/test_12_memory.py` requires 5 % of every kind and of their
sum on each rank, and AdamW's calls and bytes exactly, of a part of the layouts in the quick tests and of all in the slow ones.

The model has 4 blocks of width 64, two key and value heads for four of queries, 512 tokens and a tied embedding; with experts, three of
its feed-forward layers are mixtures of 8 experts of width 48 with a shared one. Of Muon's state under ZeRO the ranks' mean is compared:
matrices stay whole on one rank, and some ranks get more of them.

Not counted are buffers that live shorter than a block's backward pass: gradients on their way through a block, a bucket of gradients under
way (25 MiB at most for each), Newton and Schulz's products. In a model as small as this one they add between a tenth and seven tenths to
the sum; they do not grow with depth.

{TABLE}

Recomputation by `selective` is measured within PyTorch's cache: a result is in it from the forward pass until the second one takes it out.
A ring of n ranks computes 2 n + 1 parts of attention, half as many queries each, and the cache keeps the result of each part.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    torch.set_num_threads(1)
    if parser.parse_args().write:
        PAGE.write_text(TEXT.format(TABLE="\n".join(table())))
    else:
        for line in table():
            print(line, flush=True)
