"""Train a small transformer whose layers are shared out over ranks, and in one process, and show where the two differ.

python chapters/08_pipeline_parallel/run.py                              half of the layers on each of two ranks, by 1F1B
python chapters/08_pipeline_parallel/run.py --layout pp4                 also dp2_pp2, pp2_tp2, fsdp2_pp2, ...
python chapters/08_pipeline_parallel/run.py --parallel.pipeline_schedule gpipe             or zero_bubble
python chapters/08_pipeline_parallel/run.py --parallel.pipeline_schedule interleaved --parallel.pipeline_chunks 2
python chapters/08_pipeline_parallel/run.py --micro_batch_size 8         fewer micro-batches in a step: a larger bubble
python chapters/08_pipeline_parallel/run.py --impl mine                  with your own exercises
"""

from pathlib import Path

from chapters.rank_run import RankRunConfig, microbatches_of, require_cuts, run_and_compare
from shared.course.launch import launch
from shared.parallel.config import ParallelConfig


def run(config: RankRunConfig) -> None:
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.parallel.context.axis import ContextParallel
    from shared.parallel.parallelize import AXES
    from shared.parallel.pipeline.axis import PipelineParallel
    from shared.parallel.tensor.axis import TensorParallel

    axes = (*AXES, PipelineParallel(), ContextParallel(), TensorParallel())
    run_and_compare(config, packed_next_token_objective, axes, require_possible)


def require_possible(config: RankRunConfig, layout: ParallelConfig) -> None:
    """Refuse what the ranks would refuse one by one."""
    from shared.parallel.pipeline.axis import require_stages
    from shared.parallel.pipeline.schedules import make_schedule
    from shared.parallel.pipeline.simulate import validate

    require_cuts(config, layout)
    ranks, chunks, microbatches = layout.pipeline_parallel, layout.pipeline_chunks, microbatches_of(config, layout)
    if ranks > 1:
        require_stages(config.model.resolved(), layout)
        validate(make_schedule(layout.pipeline_schedule, ranks, microbatches, chunks), microbatches, chunks)


if __name__ == "__main__":
    launch(run, RankRunConfig, Path(__file__).with_name("run.yaml"))
