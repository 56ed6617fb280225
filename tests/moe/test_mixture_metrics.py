"""The experts' load as metrics: rank 0 logs the blocks of every stage of a pipeline."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layout_runs import LayoutRun
from mixture_runs import MODEL, MixtureRun
from test_expert_exchange import Operations

from shared.model.chunked_loss import packed_next_token_objective
from shared.moe.balancing import BalanceExperts
from shared.moe.layer import mixture_layers
from shared.moe.losses import balance_loss, z_loss
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig


def logged(world, layout: ParallelConfig) -> list[dict[str, float]]:
    """Of two steps, and that of a callback that has seen none."""
    run, callback = MixtureRun(world, layout), BalanceExperts()
    assert callback.every_rank, "adding up the loads takes all ranks, and each must move its own biases"
    engine, rows = SimpleNamespace(strategy=run.parallel, grad_norm=1.0), [callback.measure(SimpleNamespace(strategy=run.parallel))]
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
        ParallelConfig(tensor_parallel=2, activation_checkpointing="full"),  # whose ranks have each loss twice, and run each block twice
        ParallelConfig(pipeline_parallel=2, data_parallel=2, expert_parallel=2),
    ],
    ids=["pp2", "pp4", "interleaved", "dp2", "tp2, recomputed", "pp2_dp2_ep2"],
)
def test_every_rank_measures_the_blocks_of_all_stages(layout):
    one = logged(SingleRankCommunicator(), ParallelConfig())
    assert one[1].keys() == one[2].keys() >= {"experts/balance_loss", "experts/z_loss"}
    blocks = {name.split(".")[0] for name in one[1]} - {"experts/max_load", "experts/balance_loss", "experts/z_loss"}
    assert one[0] == {} and blocks == {f"experts/load/{block}" for block in (1, 2, 3)}
    assert one[1] != one[2] and one[1]["experts/max_load"] == max(value for name, value in one[1].items() if "_loss" not in name)
    for rows in run_threads(lambda world: logged(world, layout), layout.ranks):
        assert rows == [pytest.approx(row, rel=1e-12) for row in one]


def test_the_logged_losses_are_those_of_the_whole_step_by_token():
    """By the losses of a plain forward pass over all its rows, at the weights before it."""
    run, callback = MixtureRun(SingleRankCommunicator(), ParallelConfig()), BalanceExperts()
    expected, tokens = {"experts/balance_loss": 0.0, "experts/z_loss": 0.0}, 0
    experts = run.config.experts
    for number in range(run.microbatches):
        batch, seen = run.batches(0, number, run.config), {}
        for layer in mixture_layers(run.plain):
            layer.router.register_forward_hook(lambda _, __, routing, block=layer.layer, to=seen: to.update({block: routing}))
        valid = batch["targets"] != -100
        packed_next_token_objective(run.plain, batch)
        tokens += int(valid.sum())
        for routing in seen.values():
            scale = experts.balance_coefficient * experts.num_experts / experts.num_experts_per_tok
            expected["experts/balance_loss"] += scale * balance_loss(routing.probabilities, routing.experts, valid).item()
            expected["experts/z_loss"] += experts.z_coefficient * z_loss(routing.logits, valid).item()
    LayoutRun.train(run, 1)
    engine = SimpleNamespace(strategy=run.parallel, grad_norm=1.0)
    callback.on_step(engine)
    found = callback.measure(engine)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value / tokens, rel=1e-12), name
    assert all(not layer.losses for layer in mixture_layers(run.plain)), "the next step begins at 0"


def test_a_step_that_is_skipped_moves_no_bias_and_its_load_is_forgotten():
    run, callback = MixtureRun(SingleRankCommunicator(), ParallelConfig(), scale=1e308), BalanceExperts()
    before = {name: parameter.detach().clone() for name, parameter in run.plain.named_parameters()}
    LayoutRun.train(run, 1)
    callback.on_step(SimpleNamespace(strategy=run.parallel, grad_norm=run.update.gradient_norm.item()))
    assert run.update.skipped == 1
    for name, parameter in run.plain.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert all(layer.load is None for layer in mixture_layers(run.plain))


def operations(world, num_experts: int) -> int:
    """Of a step's sums over two ranks; measuring waits for no single number."""
    config = replace(MODEL, experts=replace(MODEL.experts, num_experts=num_experts))
    run, callback = MixtureRun(world, ParallelConfig(data_parallel=2), config=config), BalanceExperts()
    LayoutRun.train(run, 1)
    engine = SimpleNamespace(strategy=run.parallel, grad_norm=1.0)
    with Operations() as step:
        callback.on_step(engine)
    with Operations() as log:
        callback.measure(engine)
    assert "_local_scalar_dense" not in log.names and "all_reduce" not in log.names
    return len(step.names)


def test_loads_are_added_up_together_and_not_expert_by_expert():
    assert run_threads(operations, 2, 4) == run_threads(operations, 2, 16)
