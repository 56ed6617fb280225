"""Floor 6: FSDP gives one process's numbers in every layout, whatever comes between two steps."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from sharded_runs import (
    ADAMW,
    MUON,
    SMALL,
    alone,
    batch_of,
    build,
    fully_sharded,
    gradients,
    gradients_alone,
    over_ranks,
    relative,
    require_equal,
    share,
    step,
    translation_objective,
)

from shared.loop import accumulate_gradients, evaluate
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.comm.trace import Work
from shared.parallel.config import ParallelConfig
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh

TWO = ParallelConfig(fully_sharded=2)
LAYOUTS = {
    "fsdp2": TWO,
    "fsdp3 without prefetch, recomputed": ParallelConfig(fully_sharded=3, prefetch=0, activation_checkpointing="full"),
    "dp2_fsdp2, kept, recomputed in part": ParallelConfig(
        data_parallel=2, fully_sharded=2, reshard_after_forward=False, activation_checkpointing="selective"
    ),
}
GPT2 = replace(
    SMALL, position="learned", norm="layer_norm", gated=False, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True
)  # fmt: skip
T5 = ModelConfig(
    vocab_size=31, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=29, initializer_range=0.1,
    architecture="encoder-decoder", position="relative", tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", [SMALL, GPT2], ids=["llama", "gpt2, tied"])
def test_every_layout_trains_like_one_process(layout, family):
    expected = alone(family)
    for told in over_ranks(layout, family):
        require_equal(told, expected)


def test_muon_orthogonalises_whole_matrices():
    expected = alone(SMALL, MUON)
    for told in over_ranks(ParallelConfig(fully_sharded=3), SMALL, MUON):
        require_equal(told, expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_encoder_decoder_passes_gradients_between_its_stacks_and_through_its_biases(recompute):
    expected = alone(T5, objective=translation_objective)
    for told in over_ranks(replace(TWO, activation_checkpointing=recompute), T5, objective=translation_objective):
        require_equal(told, expected)


def test_a_rank_without_any_target_takes_part():
    expected = alone(SMALL)
    told = over_ranks(ParallelConfig(fully_sharded=6), SMALL)
    assert not (share(batch_of(0, 0), 0, 6)["targets"] != -100).any()
    for each in told:
        require_equal(each, expected)


FROZEN = {
    "the embedding": lambda name: name.startswith("embedding"),
    "the first blocks and what is before": lambda name: "embedding" in name or "blocks.0" in name or "blocks.1" in name,
    "a matrix in every block": lambda name: "q_proj" in name,
    "all but one block": lambda name: "blocks.1" not in name,
}


@pytest.mark.parametrize(("frozen", "recompute"), list(zip(FROZEN.values(), ["full", "none", "full", "none"], strict=True)), ids=FROZEN)
def test_frozen_parameters_have_no_gradient_and_stay(frozen, recompute):
    expected = alone(SMALL, frozen=frozen)
    for told in over_ranks(replace(TWO, activation_checkpointing=recompute), SMALL, frozen=frozen):
        require_equal(told, expected)


def test_frozen_units_are_not_reduced_and_need_no_buffer():
    def rank(world):
        parallel = fully_sharded(Mesh(TWO, world), SMALL, frozen=FROZEN["the first blocks and what is before"])
        step(parallel)
        return world.trace.calls()["reduce_scatter", "fsdp"], [flat.gradient for unit in parallel.units for flat in unit.flats]

    for reductions, _ in run_threads(rank, 2):
        assert reductions == 2  # the last block, and the trained part of the ends


def with_head_on(ranks: set[int], rank: int):
    """An objective whose head is used, in a way that gradients go through it, on some ranks only."""

    def objective(model, batch):
        head = lambda head, x: head(x) if rank in ranks else torch.nn.functional.linear(x, head.linear.weight.detach())  # noqa: E731
        return next_token_objective(lambda ids: model(ids, head_fn=head), batch)

    return objective


@pytest.mark.parametrize("ranks", [{0}, {1}, set()])
def test_what_some_rank_uses_has_a_gradient_everywhere_and_what_none_uses_has_none(ranks):
    def rank(world):
        parallel = fully_sharded(Mesh(TWO, world), SMALL)
        step(parallel, with_head_on(ranks, world.rank), microbatches=2)
        return gradients(parallel)["head.linear.weight"]

    model = build(SMALL)
    for user in ranks:
        accumulate_gradients(model, [share(batch_of(0, number), user, 2) for number in range(2)], next_token_objective)
    expected = model.head.linear.weight.grad
    for found in run_threads(rank, 2):
        assert (found is None) if expected is None else relative(found, expected) < 1e-12


# What may come between.


def test_an_evaluation_between_forward_and_backward_changes_nothing():
    def rank(world):
        parallel = fully_sharded(Mesh(TWO, world), SMALL)
        mine = share(batch_of(0, 0), world.rank, 2)
        totals = next_token_objective(parallel.model, mine)
        other = evaluate(parallel.model, [mine], next_token_objective)
        assert torch.equal(totals.loss_sum, other.loss_sum)
        totals.loss_sum.backward()
        parallel.reducer(parallel.model, totals)
        return gradients(parallel)

    expected = gradients_alone()
    for found in run_threads(rank, 2):
        assert all(relative(found[name], expected[name]) < 1e-12 for name in expected)


@pytest.mark.parametrize("jointly", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_forward_passes_may_wait_for_their_backward_passes(jointly, recompute):
    def rank(world):
        parallel = fully_sharded(Mesh(replace(TWO, activation_checkpointing=recompute), world), SMALL)
        batches = [share(batch_of(0, number), world.rank, 2) for number in range(2)]
        parts = [next_token_objective(parallel.model, batch) for batch in batches]
        if jointly:
            (parts[0].loss_sum + parts[1].loss_sum).backward()
        else:
            for part in parts:
                part.loss_sum.backward()
        parallel.reducer(parallel.model, parts[0])
        return gradients(parallel)

    expected = gradients_alone(microbatches=2)
    for found in run_threads(rank, 2):
        assert all(relative(found[name], expected[name]) < 1e-12 for name in expected)


def test_after_a_forward_pass_without_its_backward_pass_new_weights_are_gathered():
    def rank(world):
        parallel = fully_sharded(Mesh(replace(TWO, reshard_after_forward=False), world), SMALL)
        mine = share(batch_of(0, 0), world.rank, 2)
        before = next_token_objective(parallel.model, mine).loss_sum
        with torch.no_grad():
            for piece in (piece for unit in parallel.units for flat in unit.flats for piece in flat.pieces):
                piece.mul_(0.5)
        return before.item(), evaluate(parallel.model, [mine], next_token_objective).loss_sum.item()

    model = build(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    for rank_, (before, after) in enumerate(run_threads(rank, 2)):
        expected = evaluate(model, [share(batch_of(0, 0), rank_, 2)], next_token_objective).loss_sum.item()
        assert after == pytest.approx(expected, rel=1e-12) and before != pytest.approx(after, rel=1e-3)


def test_a_step_that_failed_on_all_ranks_does_not_spoil_the_next():
    def rank(world):
        parallel = fully_sharded(Mesh(TWO, world), SMALL)

        def broken(head, x):
            raise FloatingPointError("the objective's own")

        with pytest.raises(FloatingPointError):
            parallel.model(batch_of(0, 0)["input_ids"], head_fn=broken)
        step(parallel)
        return gradients(parallel)

    expected = gradients_alone()
    for found in run_threads(rank, 2):
        assert all(relative(found[name], expected[name]) < 1e-12 for name in expected)


# Wrong on purpose: each must be seen by the comparison that the tests above rest on.


def reduce_the_last_microbatch_only(parallel: FullySharded) -> None:
    """Each unit's gradients of every other backward pass stay with the rank that made them."""
    for unit in parallel.units:
        for flat in unit.flats:
            skip = cycle([True, False])
            flat.add = lambda gradient, add=flat.add, skip=skip: add(torch.zeros_like(gradient) if next(skip) else gradient)


def average(parallel: FullySharded) -> None:
    for unit in parallel.units:
        for flat in unit.flats:
            flat.add = lambda gradient, add=flat.add: add(gradient / 2)


def exchange_nothing(parallel: FullySharded) -> None:
    """Each rank takes its own gradient for the sum."""

    def reduce_scatter(part, whole, asynchronous):
        part.copy_(whole.view(parallel.mesh.fsdp.size, -1)[parallel.mesh.fsdp.rank])
        return Work()

    parallel.mesh.fsdp.reduce_scatter = reduce_scatter


@pytest.mark.parametrize("wrong", [reduce_the_last_microbatch_only, average, exchange_nothing])
def test_the_comparison_sees_what_is_wrong_on_purpose(wrong):
    expected = alone(SMALL)
    told = over_ranks(TWO, SMALL, watch=wrong)
    with pytest.raises(AssertionError, match="differ"):
        require_equal(told[0], expected)


def test_ranks_that_each_train_on_their_own_are_seen():
    """The control of the controls: without any exchange, the same comparison fails, because ranks see different data."""
    told = run_threads(lambda world: alone_on_a_share(world.rank), 2)
    with pytest.raises(AssertionError):
        require_equal(told[0], alone(SMALL))


def alone_on_a_share(rank: int):
    objective = lambda model, batch: next_token_objective(model, share(batch, rank, 2))  # noqa: E731
    return alone(SMALL, ADAMW, objective)
