"""Experts spread over ranks: every layout trains like one process, in float64: losses, gradients, norms, weights, loads."""

import pytest
from mixture_runs import alone, on_ranks, require_same

from shared.parallel.config import ParallelConfig

LAYOUTS = {
    "dp2_ep2": ParallelConfig(data_parallel=2, expert_parallel=2),
    "dp4_ep2, recomputed": ParallelConfig(data_parallel=4, expert_parallel=2, activation_checkpointing="full"),
    "dp4_ep4": ParallelConfig(data_parallel=4, expert_parallel=4),
    "dp2_ep2_zero1": ParallelConfig(data_parallel=2, expert_parallel=2, zero=1),
    "dp4_ep2_zero2, selectively": ParallelConfig(data_parallel=4, expert_parallel=2, zero=2, activation_checkpointing="selective"),
    "fsdp2_ep2, selectively": ParallelConfig(fully_sharded=2, expert_parallel=2, activation_checkpointing="selective"),
    "dp2_fsdp2_ep2, recomputed": ParallelConfig(data_parallel=2, fully_sharded=2, expert_parallel=2, activation_checkpointing="full"),
    "dp2_fsdp2_ep4": ParallelConfig(data_parallel=2, fully_sharded=2, expert_parallel=4),
    "pp2_dp2_ep2": ParallelConfig(pipeline_parallel=2, data_parallel=2, expert_parallel=2),
    "pp2_fsdp2_ep2, recomputed": ParallelConfig(
        pipeline_parallel=2, fully_sharded=2, expert_parallel=2, activation_checkpointing="full"
    ),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_like_one_process(layout, optimizer):
    require_same(on_ranks(layout, optimizer), alone(optimizer))
