"""The experts' load as metrics: rank 0 logs the blocks of every stage of a pipeline."""

from types import SimpleNamespace

import pytest
from layout_runs import LayoutRun
from mixture_runs import MixtureRun

from shared.moe.balancing import BalanceExperts
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig


def logged(world, layout: ParallelConfig) -> list[dict[str, float]]:
    """Of two steps, and that of a callback that has seen none."""
    run, callback = MixtureRun(world, layout), BalanceExperts()
    assert callback.every_rank, "adding up the loads takes all ranks, and each must move its own biases"
    engine, rows = SimpleNamespace(strategy=run.parallel), [callback.measure(SimpleNamespace(strategy=run.parallel))]
    for _ in range(2):
        LayoutRun.train(run, 1)
        callback.on_step(engine)
        rows.append(callback.measure(engine))
    return rows


@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(pipeline_parallel=2),
        ParallelConfig(pipeline_parallel=4, pipeline_layers=(1, 1, 1, 1)),  # the first stage's only block is dense
        ParallelConfig(pipeline_parallel=2, pipeline_chunks=2, pipeline_schedule="interleaved"),
        ParallelConfig(data_parallel=2),
    ],
    ids=["pp2", "pp4", "interleaved", "dp2"],
)
def test_every_rank_measures_the_blocks_of_all_stages(layout):
    one = logged(SingleRankCommunicator(), ParallelConfig())
    blocks = {name.split(".")[0] for name in one[1]} - {"experts/max_load"}
    assert one[0] == {} and blocks == {f"experts/load/{block}" for block in (1, 2, 3)}
    assert one[1] != one[2] and one[1]["experts/max_load"] == max(one[1].values())
    assert run_threads(lambda world: logged(world, layout), layout.ranks) == [one] * layout.ranks
