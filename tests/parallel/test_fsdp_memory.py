"""Floor 6: what a rank holds and gathers under FSDP, and what travels: no more than it says."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from sharded_runs import (
    SMALL,
    batch_of,
    build,
    fully_sharded,
    gradients,
    padded,
    relative,
    share,
    step,
)

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.config import ParallelConfig
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh
from shared.parallel.comm.threads import run_threads

TWO = ParallelConfig(fully_sharded=2)
LAYER = sum(p.numel() for p in build(SMALL).stack.blocks["0"].parameters())
ENDS = sum(p.numel() for p in build(SMALL).parameters()) - 3 * LAYER


def watched_bytes(layout: ParallelConfig, grad: bool = True) -> list[tuple[str, int]]:
    """(when, float64 numbers of whole weights that rank 0 holds) as each block computes and after each pass."""

    def rank(world):
        model, seen = build(SMALL), []
        stack, number = model.stack, iter(range(1000))

        def run_block(block, x, context):
            seen.append((f"block {next(number)}", parallel.gathered_bytes // 8))
            return block(x, context)

        stack.run_block = run_block
        parallel = FullySharded(model, Mesh(layout, world))
        batch = share(batch_of(0, 0), world.rank, world.size)
        with torch.set_grad_enabled(grad):
            totals = next_token_objective(model, batch)
        seen.append(("forward", parallel.gathered_bytes // 8))
        if grad:
            totals.loss_sum.backward()
            seen.append(("backward", parallel.gathered_bytes // 8))
        parallel.reducer(model, totals)
        seen.append(("step", parallel.gathered_bytes // 8))
        return seen

    return run_threads(rank, layout.ranks)[0]


def test_no_more_than_the_unit_in_use_and_those_fetched_ahead_are_whole():
    layer, ends = padded(LAYER, 3), padded(ENDS, 3)
    assert layer != LAYER  # the padding counts
    three = ParallelConfig(fully_sharded=3, prefetch=0)
    blocks = ["block 0", "block 1", "block 2"]
    assert watched_bytes(three) == [(block, ends + layer) for block in blocks] + [("forward", ends), ("backward", ends), ("step", 0)]
    ahead = dict(watched_bytes(replace(three, prefetch=1)))
    assert ahead == dict(zip(blocks, [ends + 2 * layer, ends + 2 * layer, ends + layer], strict=True)) | {
        "forward": ends, "backward": ends, "step": 0,
    }  # fmt: skip
    kept = dict(watched_bytes(replace(three, reshard_after_forward=False)))
    assert [kept[block] - ends for block in blocks] == [layer, 2 * layer, 3 * layer] and kept["forward"] == ends + 3 * layer
    assert kept["backward"] == ends and kept["step"] == 0


def test_an_evaluation_leaves_nothing_whole():
    for layout in (TWO, replace(TWO, reshard_after_forward=False)):
        seen = dict(watched_bytes(layout, grad=False))
        assert seen["forward"] == 0 and max(seen.values()) <= ENDS + 2 * LAYER + 6


def test_between_two_steps_a_rank_holds_its_shard_of_weights_gradients_and_state():
    def rank(world):
        parallel = fully_sharded(Mesh(ParallelConfig(fully_sharded=3), world), SMALL)
        step(parallel)
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for piece in parallel.model.parameters()
            for tensor in (piece, piece.grad)
            if tensor is not None and tensor.numel()
        }
        return sum(storages.values()) // 8

    assert run_threads(rank, 3) == [2 * (padded(ENDS, 3) + 3 * padded(LAYER, 3)) // 3] * 3


# What travels.


def calls_of_a_step(layout: ParallelConfig, microbatches: int = 1) -> Counter:
    def rank(world):
        parallel = fully_sharded(Mesh(layout, world), SMALL)
        step(parallel, microbatches=microbatches)
        return world.trace.calls()

    first, *others = run_threads(rank, layout.ranks)
    assert all(calls == first for calls in others)
    return first


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_block_is_gathered_for_each_pass_and_reduced_once_and_recomputing_gathers_no_more(recompute):
    layout = replace(TWO, activation_checkpointing=recompute)
    once = {("all_gather", "fsdp"): 1 + 2 * 3, ("reduce_scatter", "fsdp"): 1 + 3, ("all_reduce", "data"): 1}
    assert calls_of_a_step(layout) == once
    assert calls_of_a_step(replace(layout, reshard_after_forward=False)) == once | {("all_gather", "fsdp"): 1 + 3}
    assert calls_of_a_step(replace(layout, prefetch=0)) == once
    assert calls_of_a_step(replace(layout, prefetch=7)) == once
    twice = {operation: 2 * number for operation, number in once.items()} | {("all_reduce", "data"): 1}
    assert calls_of_a_step(layout, microbatches=2) == twice
    replicas = replace(layout, data_parallel=2)
    assert calls_of_a_step(replicas, microbatches=2) == twice | {("all_reduce", "dp"): 4}  # at the last micro-batch only


def test_the_next_unit_is_on_its_way_before_this_one_computes():
    def rank(world, ahead):
        model, begun = build(SMALL), []

        def run_block(block, x, context):
            begun.append(sum(entry.operation == "all_gather" for entry in world.trace.entries))
            return block(x, context)

        model.stack.run_block = run_block
        parallel = FullySharded(model, Mesh(replace(TWO, prefetch=ahead), world))
        step(parallel)
        backward = [entry.operation for entry in world.trace.entries if entry.phase == "backward"]
        return begun, backward

    for ahead, expected in ((0, [2, 3, 4]), (1, [3, 4, 4]), (2, [4, 4, 4])):
        begun, backward = run_threads(rank, 2, ahead)[0]
        assert begun == expected
        gather, reduce = "all_gather", "reduce_scatter"
        if ahead == 0:
            assert backward[:6] == [gather, reduce, gather, reduce, gather, reduce]
        if ahead == 1:  # the last block while the head is computed, the one before it with the last block
            assert backward[:6] == [gather, gather, reduce, gather, reduce, reduce]


def test_in_half_precision_half_the_bytes_of_blocks_are_gathered_and_the_numbers_are_autocasts():
    objective = autocast_objective(next_token_objective, "bfloat16")

    def rank(world, dtype):
        model = build(SMALL, dtype=torch.float32)
        parallel = FullySharded(model, Mesh(TWO, world), dtype=dtype)
        totals = step(parallel, objective, microbatches=2)
        assert all(piece.grad is None or piece.grad.dtype == torch.float32 for piece in model.parameters())
        return totals.loss_sum, gradients(parallel), world.trace.bytes()["all_gather", "fsdp"]

    (loss, full, of_full), _ = run_threads(rank, 2, None)
    (rounded_loss, rounded, of_rounded), _ = run_threads(rank, 2, torch.bfloat16)
    assert torch.equal(loss, rounded_loss)  # autocast rounds the same matrices, and bfloat16 holds the initial norms, which are 1
    assert all(relative(rounded[name], full[name]) <= (2**-8 if "blocks" in name and "norm" in name else 0) for name in full)
    model = build(SMALL, dtype=torch.float32)
    accumulate_gradients(model, [batch_of(0, number) for number in range(2)], objective)
    assert all(relative(full[name], p.grad) < 0.02 for name, p in model.named_parameters())  # sums of bfloat16 in another order
    passes, blocks = 2, 3 * padded(LAYER, 2)
    assert of_full - of_rounded == passes * 2 * blocks * 2  # each micro-batch gathers twice; 2 bytes less a number


# A model that no rank could hold.


def test_a_model_on_the_meta_device_gets_its_weights_piece_by_piece(monkeypatch):
    def rank(world):
        with torch.device("meta"):
            model = TransformerModel(replace(SMALL, tie_word_embeddings=True), seed=3)
        parallel = FullySharded(model, Mesh(ParallelConfig(fully_sharded=3), world), seed=3)
        held = sum(flat.shard.numel() + flat.whole.untyped_storage().nbytes() for unit in parallel.units for flat in unit.flats)
        assert held == (padded(ENDS - 31 * 20, 3) + 3 * padded(LAYER, 3)) // 3
        return {name: shard.sharding.gather(shard.detach(), everyone=True) for name, shard in model.named_parameters()}

    expected = dict(TransformerModel(replace(SMALL, tie_word_embeddings=True), seed=3).named_parameters())
    for found in run_threads(rank, 3):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
