"""PPO in every layout: answers, rewards, losses, every gradient, norms and weights of three steps equal one process's, in float64."""

import pytest
import torch
from mixture_runs import require_same
from ppo_runs import alone, on_ranks, part_of, require_same_rollouts, scripted

from shared.preference.ppo import PPOAdvantages
from shared.preference.value_head import ScalarProjection, token_scores

SLOW = pytest.mark.slow
CASES = [  # each with given answers and with drawn ones; in `make test` with one of them
    ("dp2", "dense", {}, "both"),
    ("tp2", "dense", {}, "given"),
    ("tp2_sp", "dense", {}, "drawn"),
    ("fsdp2", "dense", {}, "drawn"),
    ("dp2_zero1", "dense", {}, "given"),
    ("pp2", "dense", {}, "drawn"),
    ("dp2_ep2", "experts", {}, "drawn"),
    ("fsdp2_tp2", "dense", {}, "drawn"),
    ("pp2_fsdp2", "dense", {}, "given"),
    ("pp2_tp2", "dense", {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"}, "given"),
]


def cases(answers: str) -> list:
    return [pytest.param(*case, marks=() if always in ("both", answers) else SLOW) for *case, always in CASES]


@pytest.mark.parametrize(("word", "model", "more"), cases("given"))
def test_training_on_given_answers_equals_one_process(word, model, more):
    found = on_ranks(word, model, sampler=scripted, **more)
    require_same_rollouts(found, alone(model, sampler=scripted))
    require_same(found, alone(model, sampler=scripted))


@pytest.mark.parametrize(("word", "model", "more"), cases("drawn"))
def test_answers_and_training_equal_one_process(word, model, more):
    found = on_ranks(word, model, **more)
    require_same_rollouts(found, alone(model))
    require_same(found, alone(model))


def whitened_by_rank(monkeypatch):
    right = PPOAdvantages.__call__

    def wrong(self, rollout):
        parts = [right(self, part_of(rollout, part)) for part in (0, 1)]
        return {name: torch.cat([columns[name] for columns, _ in parts]) for name in parts[0][0]}, parts[0][1]

    monkeypatch.setattr(PPOAdvantages, "__call__", wrong)


def values_not_shared(monkeypatch):
    monkeypatch.setattr(ScalarProjection, "over_ranks", lambda self, group, leave=None: None)


def temperature_left_out(monkeypatch):
    monkeypatch.setattr("shared.preference.ppo.token_scores", lambda model, batch, temperature: token_scores(model, batch, 1.0))


BUGS = [(whitened_by_rank, "dp2"), (values_not_shared, "tp2"), (temperature_left_out, "dp2")]


@pytest.mark.parametrize(("plant", "word"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_a_planted_bug_is_found(plant, word, monkeypatch):
    one = alone("dense", sampler=scripted)
    plant(monkeypatch)
    found = on_ranks(word, sampler=scripted)
    with pytest.raises(AssertionError):
        require_same(found, one)
