"""Reward models in every layout: loss, every gradient, norms and weights of three steps equal one process's, in float64, to 1e-9."""

from functools import partial

import frozen_runs
import pytest
import torch
from frozen_runs import quantized, with_plain_base
from mixture_runs import require_same
from reward_runs import DENSE, OBJECTIVE, adapted, alone, on_ranks, pairs

from shared.course.errors import SettingError
from shared.finetune.config import AdapterConfig
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.health.agreement import RanksDisagree
from shared.parallel.health.replicas import ReplicasDiffer
from shared.preference import reward_model
from shared.preference.reward_model import RewardObjective
from shared.preference.value_head import ScalarProjection

QLORA = AdapterConfig(rank=4, targets=("all-linear",), base="nf4")

CASES = [
    ("dp2_zero1", "tied", "adamw", {}),
    ("tp2", "dense", "muon", {}),
    ("tp2_sp", "tied", "adamw", {}),
    ("fsdp2", "learned", "muon", {"recompute": "full"}),
    ("pp2", "tied", "muon", {}),
    ("dp2_ep2", "experts", "muon", {}),
    ("tp2", "lora", "adamw", {}),
    pytest.param("dp2", "dense", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("tp4", "dense", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("pp2", "dense", "adamw", {"pipeline_schedule": "zero_bubble"}, marks=pytest.mark.slow),
    pytest.param("pp2", "lora", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("fsdp2_tp2", "dense", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("pp2_dp2_ep2", "experts", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("pp2_tp2", "tied", "adamw", {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("word", "model", "optimizer", "more"), CASES)
def test_training_equals_one_process(word, model, optimizer, more):
    require_same(on_ranks(word, model, optimizer, **more), alone(model, optimizer))


def gradient_not_shared(monkeypatch):
    monkeypatch.setattr(ScalarProjection, "over_ranks", lambda self, group, leave=None: None)


def a_count_of_rows(monkeypatch):
    right = RewardObjective.totals
    by_batch = lambda self, *rest, **more: right(self, *rest, **more)._replace(token_count=torch.tensor(5))
    monkeypatch.setattr(RewardObjective, "totals", by_batch)


def other_head_on_every_layout(monkeypatch):
    monkeypatch.setattr(reward_model, "drawn", lambda seed, deviation, shape, of_model: torch.randn(shape) * deviation)


BUGS = [(gradient_not_shared, "tp2", "dense"), (a_count_of_rows, "dp2", "dense"), (other_head_on_every_layout, "tp2", "dense")]


@pytest.mark.parametrize(("plant", "word", "model"), BUGS, ids=[plant.__name__ for plant, *_ in BUGS])
def test_a_planted_bug_is_found(plant, word, model, monkeypatch):
    one = alone(model)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ReplicasDiffer, RanksDisagree)):
        require_same(on_ranks(word, model), one)


def test_tensor_parallelism_on_pytorchs_backend_is_refused_by_name():
    from shared.parallel.tensor.on_torch import parallelize_by_torch

    with pytest.raises(SettingError, match="parallel.backend torch cannot cut head, a ScalarHead"):
        parallelize_by_torch(reward_model.as_reward_model(TransformerModel(DENSE, MIXTURE)), None)


@pytest.mark.parametrize("word", ["tp2", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_adapters_over_four_bits_with_a_trained_head_equal_one_process(word):
    train = partial(frozen_runs.train, objective=OBJECTIVE, batches=pairs)
    one = train("one", partial(adapted, adapter=QLORA, prepare=with_plain_base))[0]
    frozen_runs.require_same(train(word, partial(adapted, adapter=QLORA, prepare=quantized)), one)
    assert one.gradients[0]["head.weight"].any()
