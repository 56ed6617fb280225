"""Auxiliary losses of layers under data parallelism: every layout, with a loss scale, trains like one process."""

from dataclasses import replace
import pytest
import torch
from balanced_experts import CONFIG, BalancedExperts, batch_of
from torch import Tensor

from shared.model.chunked_loss import packed_next_token_objective
from shared.loop import accumulate_gradients, train_step
from shared.model.transformer import PLAIN, TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel

ADAMW = OptimizerConfig("adamw", lr=0.01)
LAYOUTS = {
    "dp2": ParallelConfig(data_parallel=2),
    "dp3_zero2, checkpointed": ParallelConfig(data_parallel=3, zero=2, activation_checkpointing="full"),
    "fsdp2": ParallelConfig(fully_sharded=2),
    "fsdp3, checkpointed": ParallelConfig(fully_sharded=3, activation_checkpointing="full"),
    "dp2_fsdp2, selective": ParallelConfig(data_parallel=2, fully_sharded=2, activation_checkpointing="selective"),
}


def train(world: Communicator, layout: ParallelConfig, scale: float, steps: int = 3) -> dict[str, Tensor]:
    """The weights after three steps of two micro-batches of twelve rows each."""
    mesh = Mesh(layout, world)
    strategy = apply_parallel(TransformerModel(CONFIG, replace(PLAIN, feed_forward=BalancedExperts), seed=1).double(), mesh, ADAMW)
    scaler = LossScaler(LossScaleConfig(initial=scale))
    optimizer = build_optimizer(strategy.optim_params, ADAMW)
    runner = scaler.scaled(strategy.runner(accumulate_gradients))
    parts = runner, strategy.reducer, strategy.updater(Update(1.0, scaler, strategy.grad_norm))
    for step in range(steps):
        batches = [batch_of(12, seed=2 * step + number) for number in range(2)]
        mine = [{name: rows.chunk(mesh.data.size)[mesh.data.rank] for name, rows in batch.items()} for batch in batches]
        train_step(strategy.model, optimizer, mine, packed_next_token_objective, *parts)
    return strategy.full_weights()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return train(SingleRankCommunicator(), ParallelConfig(), scale=1.0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_with_a_loss_scale_trains_a_router_like_one_process(layout, expected):
    found = run_threads(lambda world: train(world, layout, scale=4096.0), layout.ranks)[0]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def test_the_comparison_notices_a_router_whose_loss_is_not_scaled(expected, monkeypatch):
    monkeypatch.setattr("shared.optim.loss_scale.set_loss_scale", lambda model, scale: None)
    found = train(SingleRankCommunicator(), ParallelConfig(), scale=4096.0)
    router = "stack.blocks.0.feed_forward.router.weight"
    assert (found[router] - expected[router]).abs().max() > 1e-3
