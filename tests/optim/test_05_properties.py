"""Property tests of chapter 05's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.optim.loss_scale import LossScale

SOLUTION = importlib.import_module("solutions.05_optimizers")
FEW = settings(max_examples=60)
SEEDS = st.integers(0, 2**32)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
BETAS = st.tuples(st.floats(0, 0.999), st.floats(0, 0.999))
RATES, DECAYS = st.floats(0, 1), st.floats(0, 1)
SCHEDULES = ("constant", "linear", "cosine", "wsd")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@FEW
@given(SEEDS, SHAPES, BETAS, RATES, DECAYS, st.integers(1, 4))
def test_adamw_does_what_torchs_does_and_leaves_the_gradient(seed, shape, betas, lr, weight_decay, steps):
    ours, theirs = drawn(seed, *shape), drawn(seed, *shape).requires_grad_()
    mean, squares = torch.zeros_like(ours), torch.zeros_like(ours)
    places = [each.data_ptr() for each in (ours, mean, squares)]
    optimizer = torch.optim.AdamW([theirs], lr, betas, eps=1e-8, weight_decay=weight_decay)
    for step in range(1, steps + 1):
        gradient = drawn(seed + step, *shape)
        theirs.grad = gradient.clone()
        optimizer.step()
        SOLUTION.adamw_update(ours, gradient, mean, squares, step, lr, betas, 1e-8, weight_decay)
        assert torch.equal(gradient, theirs.grad)
    assert [each.data_ptr() for each in (ours, mean, squares)] == places
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)


@FEW
@given(SEEDS, BETAS, st.floats(0.001, 1), st.floats(1e-3, 1e3))
def test_adamws_first_step_is_the_rate_against_the_sign_whatever_the_size(seed, betas, lr, size):
    weight, gradient = drawn(seed, 7), drawn(seed + 1, 7).sign() * size
    before = weight.clone()
    SOLUTION.adamw_update(weight, gradient, torch.zeros_like(weight), torch.zeros_like(weight), 1, lr, betas, 0.0, 0.0)
    torch.testing.assert_close(weight, before - lr * gradient.sign(), rtol=1e-9, atol=1e-9)


@FEW
@given(SEEDS, SHAPES, BETAS, RATES, DECAYS)
def test_lion_moves_each_weight_by_the_rate_or_not_at_all_beside_the_decay(seed, shape, betas, lr, weight_decay):
    weight, gradient, mean = (drawn(seed + place, *shape).round() for place in range(3))  # many are 0, so some directions are
    before, memory, asked = weight.clone(), mean.clone(), gradient.clone()
    SOLUTION.lion_update(weight, gradient, mean, lr, betas, weight_decay)
    moved = weight - before * (1 - lr * weight_decay)
    direction = betas[0] * memory + (1 - betas[0]) * asked
    clear = (direction == 0) & (memory == 0) | (direction.abs() > 1e-12)  # a sum of two rounded products may miss 0 by a rounding
    torch.testing.assert_close(moved[clear], -lr * direction.sign()[clear], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mean, betas[1] * memory + (1 - betas[1]) * asked, rtol=1e-9, atol=1e-9)
    assert torch.equal(gradient, asked)


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 2), max_size=2), st.integers(0, 5), st.floats(1e-3, 1e3))
def test_newton_schulz_applies_the_polynomial_to_singular_values_alone(seed, rows, columns, leading, steps, size):
    matrices = drawn(seed, *leading, rows, columns) * size
    before = matrices.clone()
    found = SOLUTION.newton_schulz(matrices, steps)
    left, singular, right = torch.linalg.svd(matrices, full_matrices=False)
    singular = singular / singular.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    assert torch.equal(matrices, before)
    torch.testing.assert_close(found, left @ torch.diag_embed(singular) @ right, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(SOLUTION.newton_schulz(matrices.mT, steps), found.mT, rtol=1e-7, atol=1e-7)


@FEW
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.floats(0, 0.99), st.booleans(), st.sampled_from(["original", "match_rms_adamw"]))
def test_muon_asks_once_for_a_direction_and_returns_memory_of_its_own(seed, rows, columns, momentum, nesterov, scaling):
    gradient, buffer = drawn(seed, rows, columns), drawn(seed + 1, rows, columns)
    before, memory, seen = gradient.clone(), buffer.clone(), []
    whole = (3 * rows, columns)  # this process holds a third of it
    update = SOLUTION.muon_update(gradient, buffer, lambda d: seen.append(d.clone()) or d, whole, momentum, nesterov, scaling)
    remembered = momentum * memory + (1 - momentum) * before
    direction = momentum * remembered + (1 - momentum) * before if nesterov else remembered
    scale = max(1, 3 * rows / columns) ** 0.5 if scaling == "original" else 0.2 * max(3 * rows, columns) ** 0.5
    torch.testing.assert_close(buffer, remembered, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update, direction * scale, rtol=1e-12, atol=1e-12)
    assert len(seen) == 1 and torch.equal(gradient, before)
    update += 1
    torch.testing.assert_close(buffer, remembered, rtol=1e-12, atol=1e-12)


@st.composite
def runs(draw) -> tuple[int, int, int]:
    """A run's warm-up, steps and decay, which fit into each other."""
    warmup, stable, decay = draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(1, 9))
    return warmup, warmup + stable + decay, decay


@FEW
@given(runs(), st.sampled_from(SCHEDULES), st.floats(0, 0.9))
def test_a_schedule_rises_to_1_then_never_rises_again_and_every_step_trains(run, name, minimum):
    warmup, steps, decay = run
    factors = [SOLUTION.learning_rate_factor(step, name, warmup, steps, decay, minimum) for step in range(1, steps + 4)]
    assert factors[:warmup] == [step / warmup for step in range(1, warmup + 1)]
    afterwards = factors[max(warmup - 1, 0) :]
    assert all(one >= following for one, following in zip(afterwards, afterwards[1:]))
    assert min(factors[:steps]) > 0
    if name == "constant":
        assert set(factors[warmup:]) == {1.0}
        return
    assert factors[steps - 1] > minimum
    assert factors[steps:] == pytest.approx([minimum] * 3)
    if name == "wsd":
        assert factors[warmup : steps - decay] == [1.0] * (steps - decay - warmup)
        assert factors[steps - decay] < 1
    falling = decay if name == "wsd" else steps - warmup
    shares = [(factor - minimum) / (1 - minimum) for factor in factors[steps - falling : steps]]
    parts = {"linear": lambda left: 1 - left, "cosine": lambda left: math.acos(2 * left - 1) / math.pi, "wsd": lambda left: (1 - left) ** 2}
    assert [parts[name](left) for left in shares] == pytest.approx([place / (falling + 1) for place in range(1, falling + 1)], abs=1e-6)


@FEW
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]))
def test_a_scale_grows_once_for_each_full_row_of_good_steps(steps, interval, growth, backoff):
    state = LossScale(64.0, 0)
    for good in steps:
        before = LossScale(state.scale, state.good_steps)
        after = SOLUTION.update_scale(state, good, growth, backoff, interval)
        assert state == before and after is not state
        state = after
    rows = "".join(" +"[good] for good in steps).split(" ")
    grown = sum(len(row) // interval for row in rows)
    assert state.scale == 64.0 * growth**grown * backoff ** steps.count(False)
    assert state.good_steps == len(rows[-1]) % interval
