"""Train a small mixture of experts, with its experts spread over ranks, and in one process, and show where the two differ.

python chapters/09_mixture_of_experts/run.py                             half of the experts on each of two ranks
python chapters/09_mixture_of_experts/run.py --layout fsdp2_ep2          also dp4_ep2, dp2_tp2_ep2, pp2_dp2_ep2, cp2, one, ...
python chapters/09_mixture_of_experts/run.py --model.experts.balance_coefficient 0         a router that nothing balances
python chapters/09_mixture_of_experts/run.py --model.experts.num_experts_per_tok 1         half of the rows, and of what is sent
python chapters/09_mixture_of_experts/run.py --impl mine                 with your own exercises
"""

from dataclasses import dataclass, field
from pathlib import Path

from chapters.rank_run import RankRunConfig, require_cuts, run_and_compare
from shared.course.launch import launch
from shared.moe.config import MixtureModelConfig, require_layout
from shared.parallel.config import ParallelConfig


@dataclass
class MixtureRunConfig(RankRunConfig):
    """Train on several ranks and in one process, and compare.

    Args:
        model: the model; every field of MixtureModelConfig. Tokens are bytes, so the vocabulary is 256.
    """

    model: MixtureModelConfig = field(default_factory=MixtureModelConfig)


def run(config: MixtureRunConfig) -> None:
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.moe.parallel.axis import ExpertParallel
    from shared.parallel.context.axis import ContextParallel
    from shared.parallel.parallelize import AXES
    from shared.parallel.pipeline.axis import PipelineParallel
    from shared.parallel.tensor.axis import TensorParallel

    axes = (*AXES, PipelineParallel(), ContextParallel(), TensorParallel(), ExpertParallel())
    run_and_compare(config, packed_next_token_objective, axes, require_possible)


def require_possible(config: RankRunConfig, layout: ParallelConfig) -> None:
    """Refuse what the ranks would refuse one by one."""
    from shared.moe.parallel.axis import require_experts
    from shared.parallel.pipeline.axis import require_stages

    require_cuts(config, layout)
    if config.model.experts is not None and config.model.experts.bias_update_rate is not None:
        raise ValueError("model.experts.bias_update_rate is set, and here nothing moves the bias (the trainer does): leave it out.")
    require_layout(config.model, layout)
    require_experts(config.model, layout.expert_parallel)
    if layout.pipeline_parallel > 1:
        require_stages(config.model.resolved(), layout)


if __name__ == "__main__":
    launch(run, MixtureRunConfig, Path(__file__).with_name("run.yaml"))
