"""What a rank holds and sends of a mixture of experts in a training step, measured on thread ranks beside the formulas.

python tests/support/expert_cost_table.py         the tables of chapter 09's page
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import memory_table  # noqa: E402
import pipeline_cost_table  # noqa: E402

from shared.moe.config import MixtureConfig, MixtureModelConfig  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.config import ParallelConfig  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes  # noqa: E402


def model_of(**experts) -> MixtureModelConfig:
    """Chapter 06's model, whose feed-forward layers are mixtures of 8 experts of width 48."""
    chosen = MixtureConfig(**{"num_experts": 8, "moe_intermediate_size": 48, **experts})
    return MixtureModelConfig(**vars(memory_table.SMALL) | {"experts": chosen})


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


def held_by_rank(config: MixtureModelConfig, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes) -> list[MemoryEstimate]:
    if layout.pipeline_parallel > 1:
        return [held for held, _ in pipeline_cost_table.by_rank(layout, step, config, optimizer)]
    arguments = (layout, optimizer, step.microbatches, step.precision, config, step.seq)
    return [held for held, _ in run_threads(memory_table.measure, layout.ranks, *arguments)]
