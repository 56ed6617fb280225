"""Property tests of chapter 01's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared.totals import Totals

SOLUTION = importlib.import_module("solutions.01_training_loop")
FEW = settings(max_examples=60)
SEED = st.integers(0, 2**32)
TEMPERATURE = st.floats(-2, -1e-6) | st.just(0.0) | st.floats(1e-6, 3)  # float32 has no room below 1e-38
PARTS = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=5)  # values of micro-batches, exact in float64


def weight(value: float = 2.0) -> nn.ParameterDict:
    used, unused = torch.tensor(value, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    return nn.ParameterDict({"used": nn.Parameter(used), "unused": nn.Parameter(unused)})


def objective(model: nn.ParameterDict, batch: torch.Tensor) -> Totals:
    """The sum of weight * x over a batch x; the metric is the sum of x."""
    return Totals((model["used"] * batch).sum(), torch.tensor(batch.numel()), {"x": batch.sum() * model["used"] / model["used"].detach()})


def batches(parts: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(part).double() for part in parts]


@FEW
@given(SEED, st.integers(1, 9), st.lists(st.integers(1, 4), max_size=2), st.floats(0.1, 10_000), st.floats(0, 1))
def test_cross_entropy_is_the_sum_of_log_probabilities_of_the_targets_that_count(seed, vocab, shape, scale, ignored):
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, vocab, generator=random, dtype=torch.float64)
    targets = torch.randint(vocab, tuple(shape), generator=random)
    targets = targets.where(torch.rand(tuple(shape), generator=random) >= ignored, -100)
    before = logits.clone()
    loss_sum, count = SOLUTION.cross_entropy(logits.requires_grad_(), targets)
    pairs = [(row, target) for row, target in zip(logits.reshape(-1, vocab).tolist(), targets.flatten().tolist()) if target != -100]
    wanted = sum(max(row) - row[target] + math.log(sum(math.exp(z - max(row)) for z in row)) for row, target in pairs)
    assert math.isclose(loss_sum.item(), wanted, rel_tol=1e-9, abs_tol=1e-9 * scale)
    assert (count.item(), count.dtype, loss_sum.dtype) == (len(pairs), torch.int64, torch.float64)
    loss_sum.backward()
    assert torch.equal(logits, before) and not logits.grad[targets == -100].any()
    assert torch.allclose(logits.grad.sum(dim=-1), torch.zeros(tuple(shape)).double(), atol=1e-9)  # probabilities minus one


@FEW
@given(SEED, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(1, 40))
def test_cross_entropy_of_half_precision_is_that_of_the_same_numbers_in_float32(seed, dtype, rows):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 7, generator=random).to(dtype)
    targets = torch.randint(7, (rows,), generator=random)
    loss_sum, count = SOLUTION.cross_entropy(logits, targets)
    wide, _ = SOLUTION.cross_entropy(logits.float(), targets)
    assert loss_sum.dtype == torch.float32 and torch.equal(loss_sum, wide) and count.item() == rows


@FEW
@given(PARTS, st.integers(-9, 9) | st.none())
def test_the_gradient_is_that_of_the_sum_however_the_batch_is_cut_and_on_top_of_what_is_there(parts, there):
    model = weight()
    model["used"].grad = None if there is None else torch.tensor(float(there)).double()
    totals = SOLUTION.accumulate_gradients(model, batches(parts), objective)
    everything = [value for part in parts for value in part]
    assert model["used"].grad.item() == sum(everything) + (there or 0) and model["unused"].grad is None
    assert (totals.loss_sum.item(), totals.token_count.item()) == (2 * sum(everything), len(everything))
    assert totals.metrics["x"].item() == sum(everything)
    assert not any(part.requires_grad for part in (totals.loss_sum, totals.token_count, *totals.metrics.values()))


@FEW
@given(st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 10**6))
def test_the_update_divides_in_place_and_steps_or_refuses_before_anything_changes(gradient, count):
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model["used"].grad = held = torch.tensor(gradient, dtype=torch.float64)
    if count == 0:
        with pytest.raises(ValueError):
            SOLUTION.apply_update(model, optimizer, torch.tensor(count))
        assert model["used"].item() == 2 and (held.item() == gradient or math.isnan(gradient))
        return
    SOLUTION.apply_update(model, optimizer, torch.tensor(count))
    assert model["used"].grad is held and model["unused"].grad is None and model["unused"].tolist() == [1, 1]
    mean = torch.tensor([gradient / count], dtype=torch.float64)
    assert torch.allclose(held[None], mean, rtol=1e-12, atol=0, equal_nan=True)
    assert torch.allclose(model["used"].detach()[None], 2 - 0.5 * mean, rtol=1e-12, equal_nan=True)


@FEW
@given(PARTS, st.integers(1, 9), st.integers(-99, 99))
def test_a_step_is_on_the_reduced_mean_and_without_what_an_earlier_step_left(parts, ranks, left):
    model = weight()
    model["used"].grad, model["unused"].grad = torch.tensor(float(left)).double(), torch.full((2,), float(left)).double()

    def reducer(model, totals):
        """As if `ranks` processes held the same."""
        model["used"].grad *= ranks
        return Totals(totals.loss_sum * ranks, totals.token_count * ranks, totals.metrics)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    arguments = (objective, SOLUTION.accumulate_gradients, reducer, SOLUTION.apply_update)
    totals = SOLUTION.train_step(model, optimizer, batches(parts), *arguments)
    everything = [value for part in parts for value in part]
    mean = sum(everything) / len(everything)
    assert math.isclose(model["used"].grad.item(), mean, rel_tol=1e-12) and model["unused"].grad is None
    assert math.isclose(model["used"].item(), 2 - 0.5 * mean, rel_tol=1e-12, abs_tol=1e-12) and model["unused"].tolist() == [1, 1]
    assert totals.token_count.item() == ranks * len(everything)


@FEW
@given(PARTS, st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 5) | st.none())
def test_evaluation_adds_up_and_leaves_modes_gradients_and_recording_as_they_were(parts, modes, breaks_at):
    model = nn.Sequential(nn.Sequential(nn.Dropout(), nn.Dropout()))
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    seen = []

    def judged(model, batch):
        assert not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        seen.append(batch)
        if len(seen) - 1 == breaks_at:
            raise ArithmeticError
        return Totals(model(batch).sum(), torch.tensor(batch.numel()), {})

    if breaks_at is not None and breaks_at < len(parts):
        with pytest.raises(ArithmeticError):
            SOLUTION.evaluate(model, (batch for batch in batches(parts)), judged)
    else:
        totals = SOLUTION.evaluate(model, (batch for batch in batches(parts)), judged)
        everything = [value for part in parts for value in part]
        assert (totals.loss_sum.item(), totals.token_count.item()) == (sum(everything), len(everything))
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


@FEW
@given(SEED, st.integers(1, 4), st.integers(1, 9), TEMPERATURE, st.integers(-1, 12) | st.none())
def test_a_drawn_token_is_one_of_the_likeliest_and_the_same_seed_draws_the_same(seed, rows, vocab, temperature, top_k):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    draw = lambda: SOLUTION.sample_next(logits, temperature, top_k, torch.Generator().manual_seed(seed))  # noqa: E731
    if temperature < 0 or top_k is not None and top_k < 1:
        with pytest.raises(ValueError):
            draw()
        return
    ids = draw()
    kept = 1 if temperature == 0 else min(top_k or vocab, vocab)
    assert torch.equal(logits, before) and torch.equal(ids, draw()) and ids.shape == (rows,) and ids.dtype == torch.int64
    assert (logits.gather(1, ids[:, None])[:, 0] >= logits.sort(descending=True).values[:, kept - 1]).all()
