"""Train a small transformer whose matrices or sequences are shared out over ranks, and in one process, and show where the two differ.

python chapters/07_tensor_parallel/run.py                              matrices and vocabulary over two ranks, then one process
python chapters/07_tensor_parallel/run.py --layout tp2_sp              the stream between the matrices, too: sequence parallelism
python chapters/07_tensor_parallel/run.py --layout cp2                 whole matrices, and every sequence over two ranks: ring attention
python chapters/07_tensor_parallel/run.py --layout dp2_tp2             also fsdp2_tp2, cp2_tp2, tp4, ...
python chapters/07_tensor_parallel/run.py --impl mine                  with your own exercises
"""

from pathlib import Path

from chapters.rank_run import RankRunConfig, require_cuts, run_and_compare
from shared.course.launch import launch


def run(config: RankRunConfig) -> None:
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.parallel.context.axis import ContextParallel
    from shared.parallel.parallelize import AXES
    from shared.parallel.tensor.axis import TensorParallel

    axes = (*AXES, ContextParallel(), TensorParallel())
    run_and_compare(config, packed_next_token_objective, axes, require_cuts)  # which never has all logits on one rank


if __name__ == "__main__":
    launch(run, RankRunConfig, Path(__file__).with_name("run.yaml"))
