"""Chapter 05's schedules, clipping, loss scale and precision beside transformers, torch.nn.utils, torch.amp and autocast.

Each comparison has a negative control: with one rule broken on purpose it must fail. In float64 the tolerance is 1e-12: only the order
of rounding differs.
"""

import math

import pytest
import torch
import transformers
from float_tensors import largest_difference, randn
from torch import nn

from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.optim.config import ScheduleConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.schedules import factor_at
from shared.optim.updater import Update
from shared.totals import Totals

# Schedules.

WARMUP, STEPS, DECAY, MINIMUM = 3, 10, 4, 0.1
FAMILIES = {
    "constant": (lambda o: transformers.get_constant_schedule_with_warmup(o, WARMUP), 0.0),
    "linear": (lambda o: transformers.get_linear_schedule_with_warmup(o, WARMUP, STEPS + 1), 0.0),
    "cosine": (lambda o: transformers.get_cosine_schedule_with_warmup(o, WARMUP, STEPS + 1), 0.0),
    "cosine to a minimum": (
        lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, WARMUP, STEPS + 1, min_lr_rate=MINIMUM), MINIMUM,
    ),
    "wsd": (
        lambda o: transformers.get_wsd_schedule(o, WARMUP, DECAY + 1, num_training_steps=STEPS + 1, decay_type="1-sqrt"), 0.0,
    ),
}  # fmt: skip


def rates_of(make) -> list[float]:
    """transformers' factors at its indices 0, 1, ..., STEPS + 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS + 2):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(), scheduler.step()
    return rates


@pytest.mark.parametrize("family", FAMILIES)
def test_schedules_are_transformers_one_step_later(family):
    """Its first step has the rate of index 0, which is 0. Our step n has that of its index n, of a run that is one step longer."""
    make, minimum = FAMILIES[family]
    schedule = ScheduleConfig(family.split()[0], STEPS, WARMUP, decay_steps=DECAY, minimum=minimum)
    mine = [factor_at(schedule, step) for step in range(1, STEPS + 2)]
    theirs = rates_of(make)
    assert theirs[0] == 0.0 and min(mine[:-1]) > 0.0
    assert mine == pytest.approx(theirs[1:], abs=1e-12)
    assert mine[:4] != pytest.approx(theirs[:4], abs=1e-2), "not shifted, they differ"


# Clipping, loss scaling, precision.


class Linear(nn.Module):
    """Logits of a linear layer, and the squared error of them as a loss."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = randn(*parameter.shape, seed=seed, dtype=dtype)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def squared_error(model, batch) -> Totals:
    difference = model(batch["x"]).to(batch["y"].dtype) - batch["y"]
    return Totals(difference.square().sum(), torch.tensor(len(batch["x"])), {})


def batch(step: int, rows: int = 11, dtype=torch.float64) -> dict:
    return {"x": randn(rows, 5, seed=200 + step, dtype=dtype), "y": randn(rows, 3, seed=300 + step, dtype=dtype)}


def gradients(model) -> list:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_norm):
    """Over two micro-batches of different size: torch clips the gradient of the mean over all 11 rows."""
    model, oracle = Linear(), Linear()
    microbatches = [batch(0, rows=4), batch(1, rows=7)]
    update = Update(max_norm)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatches, squared_error, accumulate_gradients, keep_totals, update)
    (sum(squared_error(oracle, part).loss_sum for part in microbatches) / 11).backward()
    norm = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, foreach=False)
    torch.optim.SGD(oracle.parameters(), lr=0.1).step()
    assert update.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    assert bool(update.clipped) == (norm > max_norm)
    assert largest_difference(gradients(model), gradients(oracle)) < 1e-12
    assert largest_difference(model.parameters(), oracle.parameters()) < 1e-12


def test_clipping_each_tensor_separately_gives_another_result():
    model, oracle = Linear(), Linear()
    for one in (model, oracle):
        squared_error(one, batch(0)).loss_sum.backward()
    Update(0.5)(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.tensor(1))
    for parameter in oracle.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.5)
    assert largest_difference(gradients(model), gradients(oracle)) > 1e-2


SCRIPT = "..x...xx....x...."  # x: a batch whose loss overflows


def scripted(step: int) -> dict:
    made = batch(step, dtype=torch.float32)
    return made | {"x": made["x"] * float("inf")} if SCRIPT[step] == "x" else made


@pytest.mark.parametrize(
    ("make_optimizer", "max_norm"),
    [(lambda weights: torch.optim.AdamW(weights, lr=0.01), 0.7), (lambda weights: torch.optim.SGD(weights, lr=0.01), None)],
    ids=["adamw, clipped", "sgd, not clipped: nothing hides a scale that stays"],
)
def test_loss_scaling_is_grad_scalers(make_optimizer, max_norm):
    """The same scales, the same skipped steps, the same weights, through overflows in the script."""
    model, oracle = Linear(torch.float32), Linear(torch.float32)
    scaler = LossScaler(LossScaleConfig(initial=2.0**8, interval=3))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    optimizer, other = make_optimizer(model.parameters()), make_optimizer(oracle.parameters())
    update, scales = Update(max_norm, loss_scaler=scaler), []
    for step in range(len(SCRIPT)):
        totals = train_step(model, optimizer, [scripted(step)], squared_error, scaler.scaled(accumulate_gradients), keep_totals, update)
        other.zero_grad()
        loss = squared_error(oracle, scripted(step)).loss_sum / 11
        theirs.scale(loss).backward()
        theirs.unscale_(other)
        nn.utils.clip_grad_norm_(oracle.parameters(), max_norm or math.inf)
        theirs.step(other)
        theirs.update()
        scales.append(scaler.state.scale)
        assert (scaler.state.scale, scaler.state.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
        assert largest_difference(model.parameters(), oracle.parameters()) < 1e-5
        if SCRIPT[step] == ".":
            assert totals.mean_loss == pytest.approx(loss.item(), rel=1e-5), "the totals are not scaled"
    assert update.skipped == SCRIPT.count("x") and len(set(scales)) > 2


def test_without_the_skip_an_overflow_ruins_the_weights():
    model = Linear(torch.float32)
    train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.01), [scripted(2)], squared_error, accumulate_gradients, keep_totals, Update(0.7),
    )
    assert not all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_is_autocast(precision):
    model, oracle, plain = Linear(torch.float32), Linear(torch.float32), Linear(torch.float32)
    autocast_objective(squared_error, precision)(model, batch(0, dtype=torch.float32)).loss_sum.backward()
    with torch.autocast("cpu", getattr(torch, precision)):
        loss = squared_error(oracle, batch(0, dtype=torch.float32)).loss_sum
    loss.backward()
    squared_error(plain, batch(0, dtype=torch.float32)).loss_sum.backward()
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model))
    assert largest_difference(gradients(model), gradients(oracle)) == 0.0 < 1e-3 < largest_difference(gradients(model), gradients(plain))
