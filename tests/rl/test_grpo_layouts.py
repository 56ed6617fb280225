"""GRPO in every layout: answers, rewards, losses, every gradient, norms and weights of three steps equal one process's, in float64."""

import pytest
import torch
from grpo_runs import alone, on_ranks
from mixture_runs import require_same
from ppo_runs import part_of, require_same_rollouts, scripted

from shared.rl.grpo import GRPOAdvantages, GRPOObjective

SLOW = pytest.mark.slow
CASES = [  # each with one way to aggregate; with given answers, or with drawn ones
    ("dp2", "dense", "token", scripted, {}),
    ("dp2", "dense", "constant", None, {}),
    ("dp2", "dense", "sequence", None, {}),
    ("tp2", "dense", "sequence", scripted, {}),
    ("fsdp2", "dense", "token", None, {}),
    ("pp2", "dense", "constant", scripted, {}),
    ("dp2_ep2", "experts", "token", None, {}),
    ("fsdp2_tp2", "dense", "sequence", None, {}),
    ("pp2_fsdp2", "dense", "token", scripted, {}),
    ("pp2_tp2", "dense", "token", scripted, {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"}),
]


@pytest.mark.parametrize(("word", "model", "variant", "sampler", "more"), CASES, ids=[f"{word}-{kind}" for word, _, kind, *_ in CASES])
def test_answers_and_training_equal_one_process(word, model, variant, sampler, more):
    found, one = on_ranks(word, model, variant, sampler, **more), alone(model, variant, sampler)
    require_same_rollouts(found, one)
    require_same(found, one)


def grouped_by_rank(monkeypatch):
    right = GRPOAdvantages.__call__

    def wrong(self, rollout):
        parts = [right(self, part_of(rollout, part)) for part in (0, 1)]
        return {name: torch.cat([columns[name] for columns, _ in parts]) for name in parts[0][0]}, parts[0][1]

    monkeypatch.setattr(GRPOAdvantages, "__call__", wrong)


def divided_by_each_micro_batch(monkeypatch):
    right = GRPOObjective.__call__

    def wrong(self, model, batch):
        totals = right(self, model, batch)
        return totals._replace(loss_sum=totals.loss_sum / totals.token_count.clamp(min=1), token_count=totals.token_count.clamp(max=1))

    monkeypatch.setattr(GRPOObjective, "__call__", wrong)


def mask_forgotten(monkeypatch):
    monkeypatch.setattr(GRPOAdvantages, "weights", lambda self, rollout: rollout.mask.double())


BUGS = [(grouped_by_rank, "token"), (grouped_by_rank, "sequence"), (divided_by_each_micro_batch, "token"), (mask_forgotten, "token")]


@pytest.mark.parametrize(("plant", "variant"), BUGS, ids=[f"{plant.__name__}-{variant}" for plant, variant in BUGS])
def test_a_planted_bug_is_found(plant, variant, monkeypatch):
    one = alone("dense", variant, scripted)
    plant(monkeypatch)
    found = on_ranks("dp2", "dense", variant, scripted)
    with pytest.raises(AssertionError):
        require_same(found, one)
