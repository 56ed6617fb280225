"""What a rank holds and sends of a mixture of experts in a training step, measured on thread ranks beside the formulas.

python tests/support/expert_cost_table.py         the tables of chapter 09's page
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import torch  # noqa: E402
from memory_table import SMALL, batch, memory_measured  # noqa: E402
from pipeline_cost_table import PipelineTracker  # noqa: E402

from shared.loop import accumulate_gradients, train_step  # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.moe.builders import MIXTURE  # noqa: E402
from shared.moe.config import MixtureConfig, MixtureModelConfig  # noqa: E402
from shared.moe.layer import mixture_layers  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.config import ParallelConfig  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes  # noqa: E402
from shared.parallel.planning.tensor_costs import Exchange  # noqa: E402
from shared.trainer.axes import RUN_AXES  # noqa: E402


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
    parallel = apply_parallel(model, Mesh(layout, world), optimizer, dtype, axes=RUN_AXES)
    stepper = build_optimizer(parallel.optim_params, optimizer)
    objective = parallel.objective(autocast_objective(packed_next_token_objective, step.precision))
    runner, updater = parallel.runner(accumulate_gradients), parallel.updater(Update(1.0, norm=parallel.grad_norm))
    world.trace.clear()
    tracker = PipelineTracker if layout.pipeline_parallel > 1 else memory_measured.MemoryTracker
    with tracker(parallel, stepper) as meter:
        batches = [batch(step.rows, step.seq) for _ in range(step.microbatches)]
        train_step(parallel.model, stepper, batches, objective, runner, parallel.reducer, updater)
    return Measured(meter.peak, world.trace, arriving)


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
