"""Train a small transformer on several ranks and in one process, and show that nothing differs but who holds and sends what.

python chapters/06_data_parallel/run.py                              two replicas, then one process
python chapters/06_data_parallel/run.py --layout dp2_zero1           also dp2_zero2, fsdp2, dp2_fsdp2, dp4, ...
python chapters/06_data_parallel/run.py --impl mine                  with your own exercises
python chapters/06_data_parallel/run.py --layout fsdp2 --parallel.backend torch --parallel.activation_checkpointing full
"""

from pathlib import Path

from chapters.rank_run import RankRunConfig, run_and_compare
from shared.course.launch import launch


def run(config: RankRunConfig) -> None:
    from shared.course.build_check import unused_line
    from shared.loss import next_token_objective
    from shared.parallel.parallelize import AXES

    if config.impl != "reference":
        print(unused_line("06", "its layouts are the core's, mixed and switched on by options, and the build's functions know of none."))
    run_and_compare(config, next_token_objective, AXES)


if __name__ == "__main__":
    launch(run, RankRunConfig, Path(__file__).with_name("run.yaml"))
