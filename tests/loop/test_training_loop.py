"""Floor 1 against plain PyTorch, and its growing points tried with dummies of what later chapters will put there."""

import math

import pytest
import torch
import torch.nn.functional as F

from chapters.byte_models import BigramModel, ByteModel
from shared.batches import random_batches, sequential_batches, split_batch
from shared.loop import accumulate_gradients, apply_update, evaluate, keep_totals, train, train_step
from shared.loss import next_token_objective
from shared.sampling import generate
from shared.totals import Totals, add_totals, bits_per_byte

STREAM = torch.randint(11, (997,), generator=torch.Generator().manual_seed(3))


def small_model(seed: int = 0, **options) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(**{"vocab_size": 11, "window": 3, "embedding_size": 5, "hidden_size": 7} | options).double()


def uneven_batches(steps: int, rows: int = 6, seq: int = 13):
    """Batches whose rows have very different numbers of counted targets."""
    for step, batch in zip(range(steps), random_batches(STREAM, rows, seq, torch.Generator().manual_seed(1)), strict=False):
        for row in range(rows):
            batch["targets"][row, : (row * 2 + step) % seq] = -100
        yield batch


def plain_training(model, optimizer, batches) -> list[float]:
    """The same training in PyTorch's own terms: the mean loss of the whole batch."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 6])
@pytest.mark.parametrize("make_optimizer", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.01)])
def test_training_equals_plain_pytorch_however_the_batch_is_cut(micro_batch_size, make_optimizer):
    """float64: the order of additions moves the last digits only, 1e-12 relative per sum."""
    ours, plain = small_model(), small_model()
    expected = plain_training(plain, make_optimizer(plain.parameters()), uneven_batches(5))
    steps = (split_batch(batch, micro_batch_size) for batch in uneven_batches(5))
    trained = train(ours, make_optimizer(ours.parameters()), steps, next_token_objective, steps=5)
    assert [totals.mean_loss for _, totals in trained] == pytest.approx(expected, rel=1e-12)
    for (name, left), right in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13, msg=name)
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_mean_of_means_would_be_another_gradient():
    """The negative control of the test above: with uneven counts, averaging averages is measurably wrong."""
    batch = next(uneven_batches(1))
    means = [next_token_objective(small_model(), piece).mean_loss for piece in split_batch(batch, 1)]
    whole = next_token_objective(small_model(), batch).mean_loss
    assert abs(sum(means) / len(means) - whole) > 1e-3


# Growing points: a pipeline schedule, data parallelism and loss scaling in miniature.


def forwards_then_backwards(model, microbatches, objective) -> Totals:
    """A runner with another order of work, as a pipeline schedule has."""
    totals = [objective(model, microbatch) for microbatch in microbatches]
    for part in reversed(totals):
        part.loss_sum.backward()
    return add_totals(totals)


class OtherRank:
    """A reducer that adds what a second process would hold: the gradients and totals of the batch's other half."""

    def __init__(self, microbatches):
        self.microbatches = microbatches

    def __call__(self, model, totals: Totals) -> Totals:
        return add_totals([totals, accumulate_gradients(model, self.microbatches, next_token_objective)])


class ScaledUpdate:
    """An updater that undoes a loss scale, skips a step with a NaN in it, and says what it did through itself."""

    def __init__(self, scale: float):
        self.scale, self.skipped = scale, 0

    def __call__(self, model, optimizer, token_count) -> None:
        for parameter in model.parameters():
            parameter.grad /= self.scale
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            apply_update(model, optimizer, token_count)
        else:
            self.skipped += 1


def one_step(runner=accumulate_gradients, reducer=keep_totals, updater=apply_update, objective=next_token_objective, rows=slice(None)):
    model = small_model()
    batch = {name: tensor[rows] for name, tensor in next(uneven_batches(1)).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    totals = train_step(model, optimizer, split_batch(batch, 2), objective, runner, reducer, updater)
    return model, totals


def assert_same_step(left, right):
    assert left[1].mean_loss == pytest.approx(right[1].mean_loss, rel=1e-12) and left[1].token_count == right[1].token_count
    for ours, theirs in zip(left[0].parameters(), right[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-13)


def test_another_runner_gives_the_same_step():
    assert_same_step(one_step(runner=forwards_then_backwards), one_step())


def test_a_reducer_joins_two_halves_into_the_whole_batch():
    other_half = split_batch({name: tensor[3:] for name, tensor in next(uneven_batches(1)).items()}, 3)
    assert_same_step(one_step(reducer=OtherRank(other_half), rows=slice(0, 3)), one_step())


def test_an_updater_can_unscale_and_skip():
    def scaled(model, batch, scale=1024.0):
        totals = next_token_objective(model, batch)
        return totals._replace(loss_sum=totals.loss_sum * scale)

    updater = ScaledUpdate(1024.0)
    model, _ = one_step(updater=updater, objective=scaled)
    for ours, theirs in zip(model.parameters(), one_step()[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
    model, _ = one_step(updater=updater, objective=lambda m, b: scaled(m, b, math.nan))
    assert updater.skipped == 1
    for ours, initial in zip(model.parameters(), small_model().parameters(), strict=True):
        assert torch.equal(ours, initial)


def test_an_objective_brings_its_own_batches_and_metrics():
    def regression(model, batch):
        error = (model(batch["input_ids"]).sum(dim=-1) - batch["values"]).pow(2)
        return Totals(error.sum(), torch.tensor(error.numel()), {"absolute_error": error.detach().sqrt().sum()})

    model = small_model()
    batch = {"input_ids": STREAM[:12].view(3, 4), "values": torch.zeros(3, 4, dtype=torch.float64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    totals = train_step(model, optimizer, split_batch(batch, 2), regression, accumulate_gradients, keep_totals, apply_update)
    expected = model(batch["input_ids"]).sum(dim=-1).abs().mean().item()
    assert totals.mean_metrics()["absolute_error"] == pytest.approx(expected, rel=1e-12)


# The rest of the floor.


def test_train_says_when_the_data_ends():
    model = small_model()
    steps = (split_batch(batch, 2) for batch in uneven_batches(2))
    with pytest.raises(ValueError, match="after 2 of 3 steps"):
        list(train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, next_token_objective, steps=3))


def test_no_micro_batches_is_an_error():
    with pytest.raises(ValueError, match="no micro-batches"):
        accumulate_gradients(small_model(), [], next_token_objective)


def test_targets_are_the_inputs_one_later():
    batch = next(random_batches(STREAM, 4, 9, torch.Generator().manual_seed(0)))
    assert batch["input_ids"].shape == batch["targets"].shape == (4, 9)
    assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])


def test_sequential_batches_count_each_target_once():
    batches = list(sequential_batches(STREAM, batch_size=5, seq=13))
    assert torch.equal(torch.cat([batch["targets"].flatten() for batch in batches]), STREAM[1 : 1 + 76 * 13])
    assert sum(len(batch["targets"]) for batch in sequential_batches(STREAM, 5, 13, limit=7)) == 7


def test_text_shorter_than_a_window_is_refused():
    for batches in (random_batches(STREAM[:9], 2, 9, torch.Generator()), sequential_batches(STREAM[:9], 2, 9)):
        with pytest.raises(ValueError, match="9 tokens, fewer than one window of 9"):
            next(batches)


def test_splitting_a_batch_loses_nothing():
    batch = next(uneven_batches(1))
    pieces = split_batch(batch, 4)
    assert [len(piece["targets"]) for piece in pieces] == [4, 2]
    for name in batch:
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), batch[name])


def test_byte_model_sees_its_window_and_nothing_later():
    model = small_model()
    ids = STREAM[:20][None]
    logits = model(ids)
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    differs = (model(changed) != logits).any(dim=-1)[0].nonzero().flatten().tolist()
    assert differs == [10, 11, 12]
    torch.testing.assert_close(model(ids[:, 8:])[:, 2:], logits[:, 10:])  # a full window is all that a position needs


def test_bigram_table_is_the_counted_distribution():
    model = BigramModel.count(torch.tensor([0, 1, 0, 1, 0, 2]), vocab_size=3, smoothing=0.0)
    assert model(torch.tensor([[0]])).exp().flatten().tolist() == pytest.approx([0, 2 / 3, 1 / 3])
    totals = evaluate(model, [{"input_ids": torch.tensor([[0, 1]]), "targets": torch.tensor([[1, 0]])}], next_token_objective)
    assert totals.mean_loss == pytest.approx(-math.log(2 / 3) / 2)


def test_bits_per_byte_of_a_model_that_knows_nothing_is_eight():
    logits, targets = torch.zeros(10, 256), torch.arange(10)
    assert bits_per_byte(F.cross_entropy(logits, targets, reduction="sum"), 10) == pytest.approx(8.0)


def test_greedy_generation_follows_the_model_and_leaves_its_mode():
    model = small_model(dropout=0.5).train()
    prompt = STREAM[:4][None]
    drawn = torch.stack(list(generate(model, prompt, 6, context=3, temperature=0.0)), dim=1)
    assert model.training
    ids = torch.cat([prompt, drawn], dim=1)
    expected = model.eval()(ids).argmax(dim=-1)[:, 3:-1]  # every position sees the same window as in generation
    assert torch.equal(drawn, expected)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(small_model(), torch.empty(1, 0, dtype=torch.long), 3, context=3))
