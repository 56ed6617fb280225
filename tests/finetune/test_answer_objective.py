"""The objective of supervised fine-tuning: the loss and gradients of all rows, from the rows that have a target."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from context_runs import packed_batches
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW
from sharded_runs import SMALL as WIDTHS

from shared.finetune.answer_objective import ROWS, answer_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.trainer.models import RUN_AXES

SMALL = replace(WIDTHS, intermediate_size=28)


def observed(objective, layout, world):
    return LayoutRun(world, layout, SMALL, ADAMW, objective, batches=packed_batches, axes=RUN_AXES).record()


@pytest.mark.parametrize("name", ["one", "dp2", "tp2", "tp2_sp", "cp2", "pp2", "fsdp2"])
def test_it_is_next_token_prediction_in_every_layout(name):
    layout = parse_layout(name, ParallelConfig())
    work = partial(observed, answer_objective, layout)
    records = [work(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(work, layout.ranks)
    one = observed(packed_next_token_objective, ParallelConfig(), SingleRankCommunicator())
    weights = {name: tensor for record in records for name, tensor in record.weights.items()}
    assert largest_difference(weights, one.weights) < 1e-9
    for record in records:
        assert record.tokens == one.tokens
        torch.testing.assert_close(torch.stack(record.losses), torch.stack(one.losses), rtol=1e-9, atol=0)
        torch.testing.assert_close(torch.stack(record.norms), torch.stack(one.norms), rtol=1e-9, atol=0)


def test_a_batch_without_a_target_has_no_loss_and_gradients_of_zero():
    model, batch = TransformerModel(SMALL).double(), packed_batches(0, 0, SMALL)
    totals = answer_objective(model, batch | {"targets": torch.full_like(batch["targets"], -100)})
    totals.loss_sum.backward()
    assert totals.loss_sum == totals.token_count == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_logits_are_made_for_trained_tokens_alone():
    model, batch, seen = TransformerModel(SMALL).double(), packed_batches(0, 0, SMALL), []
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:-1].numel()))
    totals = answer_objective(model, batch)
    assert sum(seen) == totals.token_count < batch["targets"].numel() / 2


def test_in_16_bits_a_few_rows_without_a_target_fill_up_their_number():
    batch, found, seen = packed_batches(0, 0, SMALL), [], []
    for objective in (answer_objective, packed_next_token_objective):
        model = TransformerModel(SMALL, seed=1)
        model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:-1].numel()))
        totals = autocast_objective(objective, "bfloat16")(model, batch)
        totals.loss_sum.backward()
        found.append((totals, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (totals, gradients), (plain, wanted) = found
    assert seen[0] == ROWS > totals.token_count == plain.token_count
    torch.testing.assert_close(totals.loss_sum, plain.loss_sum, rtol=1e-4, atol=0)
    assert largest_difference(gradients, wanted) < 0.02


def test_a_compiled_model_has_the_same_loss_and_gradients():
    """As `engine.compile` does it; the compiler's front alone, without its back, which needs a C++ compiler."""
    batch, found = packed_batches(0, 0, SMALL), []
    for compiled in (False, True):
        model = TransformerModel(SMALL, seed=1).double()
        calls = []
        if compiled:
            model.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
        totals = answer_objective(model, batch)
        totals.loss_sum.backward()
        assert bool(calls) == compiled
        found.append((totals, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (plain, wanted), (totals, gradients) = found
    assert totals.token_count == plain.token_count and gradients.keys() == wanted.keys()
    torch.testing.assert_close(totals.loss_sum, plain.loss_sum, rtol=1e-12, atol=0)
    assert largest_difference(gradients, wanted) < 1e-12
