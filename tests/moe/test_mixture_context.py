"""Experts under context parallelism: each rank routes its positions of every row, and the balance loss is that of whole rows."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from context_runs import packed_batches
from mixture_runs import EXPERTS, MODEL, MixtureRun, on_ranks, require_same

from shared.course.errors import SettingError
from shared.moe.losses import balance_loss
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout

DROPLESS = replace(MODEL, experts=replace(EXPERTS, capacity_factor=None))
LAYOUTS = [
    ("cp2", "muon", "none"),
    ("cp4", "adamw", "full"),
    ("dp2_cp2_zero1", "adamw", "selective"),
    ("fsdp2_cp2", "muon", "full"),
    ("cp2_tp2_sp", "adamw", "full"),
    ("pp2_cp2", "muon", "none"),
    ("dp2_cp2_ep2", "adamw", "none"),
    pytest.param("dp2_cp2_tp2_sp_ep2", "muon", "selective", marks=pytest.mark.slow),
]


@cache
def alone(optimizer: str) -> dict:
    return on_ranks(parse_layout("one"), optimizer, config=DROPLESS, batches=packed_batches)[0]


@pytest.mark.parametrize(("word", "optimizer", "recompute"), LAYOUTS)
def test_every_layout_trains_like_one_process(word, optimizer, recompute):
    layout = replace(parse_layout(word), activation_checkpointing=recompute)
    require_same(on_ranks(layout, optimizer, config=DROPLESS, batches=packed_batches), alone(optimizer))


def test_the_comparison_notices_counts_of_a_part_of_a_row(monkeypatch):
    from shared.moe import layer

    monkeypatch.setattr(layer, "balance_loss", lambda p, e, v, over_row: balance_loss(p, e, v))
    with pytest.raises(AssertionError):
        require_same(on_ranks(parse_layout("cp2"), config=DROPLESS, batches=packed_batches), alone("adamw"))


def test_adding_up_over_a_row_leaves_what_was_counted_here(monkeypatch):
    from shared.moe import layer

    changed = []

    def watched(probabilities, experts, valid, over_row):
        def added(counts):
            before = counts.clone()
            whole = over_row(counts)
            changed.append((not torch.equal(counts, before), not torch.equal(whole, before)))
            return whole

        return balance_loss(probabilities, experts, valid, added)

    monkeypatch.setattr(layer, "balance_loss", watched)
    run_threads(lambda world: MixtureRun(world, parse_layout("cp2"), config=DROPLESS, batches=packed_batches).train(1), 2)
    assert {here for here, _ in changed} == {False} and (False, True) in changed


def test_the_ranks_parts_of_the_balance_loss_add_up_to_that_of_the_rows():
    """Rows of uneven length over three ranks, one of which has no valid token of the last row."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(3, 12, 5, dtype=torch.float64, generator=generator).softmax(dim=-1)
    experts = torch.rand(3, 12, 5, generator=generator).topk(2).indices
    valid = torch.arange(12) < torch.tensor([[12], [7], [4]])

    def on_rank(world):
        def over_row(counts):
            whole = counts.clone()
            world.all_reduce(whole)
            return whole

        part = slice(world.rank, None, 3)
        leaf = probabilities[:, part].clone().requires_grad_()
        loss = balance_loss(leaf, experts[:, part], valid[:, part], over_row)
        loss.backward()
        return loss.detach(), leaf.grad

    leaf = probabilities.clone().requires_grad_()
    whole = balance_loss(leaf, experts, valid)
    whole.backward()
    parts = run_threads(on_rank, 3)
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole.detach(), rtol=1e-12, atol=0)
    for rank, (_, gradient) in enumerate(parts):
        torch.testing.assert_close(gradient, leaf.grad[:, rank::3], rtol=1e-12, atol=1e-15)


def test_a_capacity_is_refused():
    with pytest.raises(SettingError, match="capacity_factor with parallel.context_parallel"):
        run_threads(lambda world: MixtureRun(world, parse_layout("cp2")).train(1), 2)
