"""Floor 5: schedules move every rate, the updater does what chapter 01's does and skips what overflowed, half precision trains."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from optim_models import (
    CONFIGS,
    batches,
    model_of,
    same,
    trained,
)

from shared.loop import accumulate_gradients, apply_update, train
from shared.loss import next_token_objective
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig, ScheduleConfig
from shared.optim.loss_scale import KeepLossScale, LossScale, LossScaleConfig, LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.schedules import ScheduleLearningRate, attach_schedule, factor_at
from shared.optim.updater import Update
from shared.totals import Totals

# Schedules.


def test_following_a_schedule_moves_every_group_in_proportion():
    model = model_of()
    optimizer = build_optimizer(model, OptimizerConfig("muon", lr=0.4, scaling="original", adamw_lr=0.1, newton_schulz_dtype="float32"))
    schedule = ScheduleConfig("linear", steps=4, warmup_steps=2, minimum=0.0)
    attach_schedule(schedule, optimizer)
    seen = []
    for _ in train(model, optimizer, batches(), next_token_objective, steps=6):
        seen.append({group["rule"]: group["lr"] for group in optimizer.param_groups})
    factors = [0.5, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    assert [rates["muon"] for rates in seen] == pytest.approx([0.4 * factor for factor in factors])
    assert [rates["adamw"] for rates in seen] == pytest.approx([0.1 * factor for factor in factors])


def test_the_callback_counts_with_the_engine():
    model = model_of()
    engine = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=2.0), step=6)
    callback = ScheduleLearningRate(ScheduleConfig("cosine", steps=9, warmup_steps=0, minimum=0.0))
    callback.on_start(engine)
    callback.before_optimizer(engine)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 0.5 * (1 + math.cos(math.pi * 0.7)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "cosin"}, "no schedule 'cosin'"),
        ({"steps": 0}, "^steps is 0: give at least 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1: give at least 0"),
        ({"minimum": 1.5}, "minimum is 1.5: give at least 0 and at most 1"),
        ({"steps": 50, "warmup_steps": 50}, "need 51 steps and the run has 50"),
        ({"name": "wsd", "steps": 100, "warmup_steps": 50, "decay_steps": 51}, "need 101 steps and the run has 100"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ScheduleConfig(**settings)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_every_step_of_a_run_trains(name):
    schedule = ScheduleConfig(name, steps=40, warmup_steps=7, decay_steps=33, minimum=0.0)
    factors = [factor_at(schedule, step) for step in range(1, 41)]
    assert min(factors) > 0 and max(factors) == factors[6] == 1.0
    assert all(a < b for a, b in zip(factors[:7], factors[1:7], strict=False)), "the warm-up rises"


# The updater, the loss scale, precision.


def test_without_clipping_and_scaling_the_updater_is_chapter_01s():
    mine, plain = model_of().double(), model_of().double()
    trained(mine, torch.optim.SGD(mine.parameters(), lr=0.1), 3, updater=Update())
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3, updater=apply_update)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))


def test_a_step_without_tokens_is_refused_before_anything_changes():
    model = model_of()
    optimizer, kept = build_optimizer(model, CONFIGS["adamw"]), copy.deepcopy(model)
    with pytest.raises(ValueError, match="No target counted"):
        Update(1.0)(model, optimizer, torch.tensor(0))
    assert same(model, kept) and not optimizer.state
    with pytest.raises(ValueError, match="max_norm is 0.0"):
        Update(0.0)


def test_an_overflow_leaves_weights_and_optimizer_as_they_were():
    model, scaler = model_of(), LossScaler(LossScaleConfig(initial=8.0))
    optimizer, update = build_optimizer(model, CONFIGS["adamw"]), Update(1.0, scaler)
    trained(model, optimizer, 1, runner=scaler.scaled(accumulate_gradients), updater=update)
    kept, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    update(model, optimizer, torch.tensor(5))
    assert same(model, kept) and update.skipped == 1 and scaler.state == LossScale(4.0, 0)
    assert all(torch.equal(held["step"], state["state"][index]["step"]) for index, held in optimizer.state_dict()["state"].items())


def test_a_run_that_overflows_at_every_scale_is_stopped():
    scaler = LossScaler(LossScaleConfig(initial=1.0))
    with pytest.raises(ValueError, match="the run has diverged"):
        for _ in range(100):
            scaler.update(finite=False)
    with pytest.raises(ValueError, match="growth is 1.0: give a number above 1"):
        LossScaleConfig(growth=1.0)


def test_the_loss_scale_is_in_the_checkpoint():
    scaler, other = LossScaler(LossScaleConfig(initial=8.0, interval=2)), LossScaler()
    for finite in (True, True, True, False, True):
        scaler.update(finite)
    KeepLossScale(other).load_state_dict(json.loads(json.dumps(KeepLossScale(scaler).state_dict())))
    assert other.state == scaler.state == LossScale(8.0, 1)
    assert KeepLossScale(other).measure(None) == {"train/loss_scale": 8.0}


def test_half_precision_trains_as_well_as_float32():
    ends = {}
    for precision in ("float32", "bfloat16", "float16"):
        model, scaler = model_of(), LossScaler(LossScaleConfig(initial=2.0**20))
        scaled = precision == "float16"
        update = Update(1.0, scaler if scaled else None)
        loop = train(
            model, build_optimizer(model, CONFIGS["adamw"]), batches(), autocast_objective(next_token_objective, precision), steps=60,
            runner=scaler.scaled(accumulate_gradients) if scaled else accumulate_gradients, updater=update,
        )  # fmt: skip
        ends[precision] = [totals.mean_loss for _, totals in loop][-1]
        assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in model.parameters())
        assert (update.skipped > 0) == scaled, "2**20 is too much for float16, and is found to be"
    assert max(ends.values()) < 1.6


def test_small_gradients_survive_float16_only_with_a_scale():
    """A loss of 1e-8 times the usual: in float16 its gradients are below the smallest number."""
    model = model_of()

    def tiny(model, batch):
        totals = next_token_objective(model, batch)
        return Totals(totals.loss_sum * 1e-8, totals.token_count, {})

    [batch] = next(batches())
    lost = {}
    scaled = LossScaler(LossScaleConfig(initial=2.0**26)).scaled(accumulate_gradients)
    for name, runner in (("plain", accumulate_gradients), ("scaled", scaled)):
        model.zero_grad()
        runner(model, [batch], autocast_objective(tiny, "float16"))
        gradient = model.stack.blocks["0"].attention.q_proj.weight.grad
        lost[name] = (gradient == 0).double().mean().item()
    assert lost["plain"] > 0.9 and lost["scaled"] < 0.1


def test_weights_in_half_precision_are_refused():
    model = model_of().bfloat16()
    with pytest.raises(ValueError, match="embedding.tokens.weight is stored in bfloat16.*float32"):
        autocast_objective(next_token_objective, "bfloat16")(model, next(batches())[0])
    with pytest.raises(ValueError, match="no precision 'fp8'"):
        autocast_objective(next_token_objective, "fp8")
