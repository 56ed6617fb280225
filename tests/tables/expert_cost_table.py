"""What a rank holds and sends of a mixture of experts in a training step, measured on thread ranks beside the formulas.

python tests/tables/expert_cost_table.py         the tables of chapter 09's page
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
import yaml  # noqa: E402
from memory_table import ADAMW, KINDS, RECOMPUTE, SMALL, cell, memory_measured  # noqa: E402
from pipeline_cost_table import PipelineTracker  # noqa: E402

from shared.course.paths import CHECKOUT  # noqa: E402
from shared.loop import accumulate_gradients, train_step # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.moe.builders import MIXTURE  # noqa: E402
from shared.moe.config import MixtureConfig, MixtureModelConfig # noqa: E402
from shared.moe.layer import mixture_layers  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.planning.costs import Exchange, Link  # noqa: E402
from shared.parallel.planning.expert_costs import expert_exchanges, step_time # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, estimate_memory # noqa: E402
from shared.trainer.config import TrainerConfig  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402
from shared.trainer.settings import parse_text, read_settings # noqa: E402

two_cards = import_module("chapters.07_tensor_parallel.timeline")


def model_of(**experts) -> MixtureModelConfig:
    """Chapter 06's model, whose feed-forward layers are mixtures of 8 experts of width 48."""
    chosen = MixtureConfig(**{"num_experts": 8, "moe_intermediate_size": 48, **experts})
    return MixtureModelConfig(**vars(SMALL) | {"experts": chosen})


MODELS = {
    "mixtral": model_of(z_coefficient=0.01),
    "olmoe": model_of(norm_topk_prob=False, num_experts_per_tok=3, implementation="loop"),
    "deepseek": model_of(
        scoring="sigmoid", num_shared_experts=1, first_k_dense=1, bias_update_rate=0.01, routed_scaling_factor=2.0, n_group=2
    ),
    "without losses": model_of(balance_coefficient=0.0),
}
"""By name, what the formulas cover."""
OTHERS = {
    "with a capacity": model_of(capacity_factor=1.0),
    "batched": model_of(implementation="batched"),
    "as wide as dense": model_of(num_experts_per_tok=4, moe_intermediate_size=43, balance_coefficient=0.0),
}


class Measured(NamedTuple):
    """Of a rank. held: in a step. trace: of what it sends. arriving: by micro-batch and layer, how many rows its experts got."""

    held: MemoryEstimate
    trace: CommTrace
    arriving: list[int]


def measure(world: Communicator, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes, config: ModelConfig) -> Measured:
    arriving: list[int] = []
    model, dtype = TransformerModel(config, MIXTURE), None if step.precision == "float32" else torch.bfloat16
    for layer in mixture_layers(model):
        layer.experts.up_proj.register_forward_hook(lambda module, inputs, output: arriving.append(len(output)))
    mesh = Mesh(layout, world)
    parallel = apply_parallel(model, mesh, optimizer, dtype, axes=RUN_AXES)
    stepper = build_optimizer(parallel.optim_params, optimizer)
    objective = parallel.objective(autocast_objective(packed_next_token_objective, step.precision))
    runner, updater = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm))
    world.trace.clear()
    tracker = PipelineTracker if layout.pipeline_parallel > 1 else memory_measured.MemoryTracker
    with tracker(parallel, stepper) as meter:
        batches = batches_of(mesh.data.rank, step)
        train_step(parallel.model, stepper, batches, objective, runner, parallel.reducer, updater)
    return Measured(meter.peak, world.trace, arriving)


def batches_of(share: int, step: StepSizes) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a data rank: always the same, so that the router decides the same."""
    generator, ids = torch.Generator().manual_seed(share), []
    for _ in range(step.microbatches):
        ids.append(torch.randint(SMALL.vocab_size, (step.rows, step.seq + 1), generator=generator))
    return [{"input_ids": each[:, :-1].contiguous(), "targets": each[:, 1:].contiguous()} for each in ids]


def by_rank(config: ModelConfig, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes) -> list[Measured]:
    return run_threads(measure, layout.ranks, layout, optimizer, step, config)


def measured_imbalance(found: Measured, layout: ParallelConfig, step: StepSizes, config: ModelConfig) -> float:
    """How many rows the rank's experts got, in shares of an equal number, on average over layers and micro-batches."""
    own = step.rows * step.seq // layout.context_parallel * config.experts.num_experts_per_tok
    return sum(found.arriving) / len(found.arriving) / own


def counted(exchanges: Iterable[Exchange]) -> dict[tuple[str, str], tuple[float, float]]:
    """(operation, axis) -> calls and bytes of a step."""
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in exchanges:
        calls[each.operation, each.axis] += each.calls
        sizes[each.operation, each.axis] += each.calls * each.bytes
    return {key: (calls[key], sizes[key]) for key in calls}


# The tables.

STEP = StepSizes(3, 48, 1)
SHOWN = [
    ("one", "none"), ("dp2", "none"), ("dp2_zero1", "none"), ("fsdp2", "none"), ("dp2_ep2", "none"), ("dp2_ep2", "full"),
    ("dp4_ep2", "none"), ("dp4_ep2_zero1", "none"), ("fsdp2_ep2", "none"), ("fsdp4_ep2", "none"), ("dp4_ep4", "none"),
    ("dp2_tp2_ep2", "none"),
]  # fmt: skip
RATES = {"NVLink": two_cards.NVLINK, "PCIe": two_cards.PCIE}  # GB/s
CARDS = ("dp2_ep2_zero1", "fsdp2_ep2", "fsdp2", "dp2_zero1")


def memory_and_exchanges() -> Iterator[str]:
    """Two tables, of the rank of each layout whose experts got most rows: what it holds, and what it exchanges for its experts."""
    exchanges = ["", "| layout | recomputed | operation | calls | bytes of the tensors |", "|---|---|---|---|---|"]
    yield f"| layout | recomputed | experts' rows | {' | '.join(KINDS.values())} |"
    yield "|" + "---|" * (3 + len(KINDS))
    config = MODELS["deepseek"]
    for word, how in SHOWN:
        layout = replace(parse_layout(word), activation_checkpointing=how)
        found = max(by_rank(config, layout, ADAMW, STEP), key=lambda each: sum(each.arriving))
        step = replace(STEP, imbalance=measured_imbalance(found, layout, STEP, config))
        predicted = estimate_memory(config, layout, ADAMW, step)
        cells = (cell(getattr(predicted, kind), getattr(found.held, kind)) for kind in KINDS)
        yield f"| {word} | {RECOMPUTE[how]} | {step.imbalance:.3f} | {' | '.join(cells)} |"
        for key, (calls, sent) in counted(expert_exchanges(config, layout, step)).items():
            both = f"{calls:g} / {found.trace.calls()[key]:g} | {cell(sent, found.trace.bytes()[key])}"
            exchanges.append(f"| {word} | {RECOMPUTE[how]} | {key[0]} over {key[1]} | {both} |")
    yield from exchanges


def two_3090s() -> tuple[TrainerConfig, ModelConfig]:
    """The configuration for two cards, and its model with the vocabulary that its text gets."""
    path = CHECKOUT / "chapters" / "12_grpo" / "two_3090s_ep2.yaml"
    config = parse_text(TrainerConfig, yaml.safe_dump(read_settings(path)))
    return config, replace(config.model, vocab_size=config.data.prepare.vocab_size)


def time_table() -> Iterator[str]:
    """The step of `two_3090s_ep2.yaml`, by layout and by how uneven the load is, over both links."""
    config, model = two_3090s()
    step = StepSizes(config.data.micro_batch_size, config.data.seq, 128 // config.data.micro_batch_size, config.precision)
    yield "| layout | rows of the fullest rank / mean | GB a card | products | waiting | " + " | ".join(
        f"{what}, {name}" for name in RATES for what in ("all-to-all", "experts' weights and gradients", "in all")
    ) + " |"
    yield "|" + "---|" * (5 + 3 * len(RATES))
    for word in CARDS:
        for uneven in (1.0, 1.1, 1.5, 2.0) if "ep" in word else (1.0,):
            layout, here = parse_layout(word), replace(step, imbalance=uneven)
            needs = estimate_memory(model, layout, config.optimizer, here, packed=True).total / 1e9
            times = [step_time(model, layout, here, Link(two_cards.LATENCY, rate * 1e9), two_cards.SPEED) for rate in RATES.values()]
            cells = [f"{needs:.1f}", f"{times[0].products:.1f}", f"{times[0].waiting:.1f}"]
            cells += [f"{each:.1f}" for time in times for each in (time.exchange, time.experts, sum(time))]
            yield f"| {word} | {uneven:g} | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in chain(memory_and_exchanges(), [""], time_table()):
        print(line, flush=True)
