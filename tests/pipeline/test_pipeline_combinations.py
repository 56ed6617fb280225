"""Pipelines over other axes: chunks under tensor parallelism, sequences shared out, ZeRO with tied ends, FSDP kept for a step."""

from collections import Counter

import pytest
import torch
from layout_runs import largest_difference
from pipeline_runs import MICROBATCHES, autocast_objective, expected, observed, on_ranks, require_same

KEPT = {"reshard_after_forward": False}
RUNS = [  # layout, family, optimizer, schedule, settings
    ("pp2_tp2", "gpt2", "sgd", "interleaved", {}),
    ("pp2_tp2_sp", "qwen3", "sgd", "interleaved", {"activation_checkpointing": "full"}),
    ("pp2_tp2", "mqa", "muon", "zero_bubble", {}),
    ("pp2_cp2", "gpt2", "sgd", "1f1b", {}),
    ("pp2_dp3_zero1", "bloom", "muon", "1f1b", {"bucket_megabytes": 0.003}),  # in which the tied weight has a bucket of its own
    ("pp2_fsdp2", "gpt2", "sgd", "1f1b", KEPT),
    ("pp2_fsdp2", "gpt2", "muon", "zero_bubble", KEPT),
    ("pp2_dp2", "gpt2", "adamw", "zero_bubble", {"activation_checkpointing": "full"}),  # no hook says too early that a gradient is whole
]
LONG = [
    ("pp2_tp2_sp", "gpt2", "sgd", "zero_bubble", {}),
    ("pp4_tp2_sp", "gpt2", "sgd", "1f1b", {}),
    ("pp2_cp2", "mistral", "muon", "interleaved", {}),
    ("pp2_cp2", "llama", "adamw", "zero_bubble", {"activation_checkpointing": "selective"}),
    ("pp2_cp2_tp2_sp", "gpt2", "sgd", "1f1b", {}),
    ("pp2_fsdp2_cp2", "gpt2", "sgd", "1f1b", KEPT),
    ("pp2_dp2_zero1", "gpt2", "adamw", "interleaved", {}),
    ("pp2_dp2_zero1", "llama", "muon", "zero_bubble", {"activation_checkpointing": "full"}),
    ("pp2_cp2", "llama", "sgd", "zero_bubble", {"activation_checkpointing": "full"}),
    ("pp2_dp2_tp2_zero1", "gpt2", "adamw", "1f1b", {}),
    ("pp2_dp2_fsdp2", "qwen3", "muon", "interleaved", KEPT),
    ("pp2_fsdp2_tp2", "gpt2", "sgd", "zero_bubble", KEPT | {"activation_checkpointing": "full"}),
    ("pp4_fsdp2", "llama", "sgd", "gpipe", KEPT),
]


@pytest.mark.parametrize(
    "layout, family, optimizer, schedule, settings", RUNS + [pytest.param(*run, marks=pytest.mark.slow) for run in LONG]
)
def test_a_pipeline_over_other_axes_does_what_one_process_does(layout, family, optimizer, schedule, settings):
    require_same(on_ranks(observed, layout, family, optimizer, schedule, **settings), expected(family, optimizer))


def exchanged(run) -> Counter:
    """(operation, how many numbers) of a step over fsdp."""
    run.train(1)
    before = len(run.world.trace.entries)
    run.train(1)
    entries = [entry for entry in list(run.world.trace.entries)[before:] if entry.axis == "fsdp"]
    return Counter((entry.operation, entry.bytes // 8) for entry in entries)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_weights_travel_with_each_micro_batch_or_once_a_step(schedule):
    """Freed after use, a block is gathered twice for each micro-batch and reduced once; kept, both happen once in a step."""
    block = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16  # numbers; each of two ranks has two blocks
    freed, kept = (on_ranks(exchanged, "pp2_fsdp2", "llama", "sgd", schedule, **settings) for settings in ({}, KEPT))
    for found in freed:
        assert found["all_gather", block] == 2 * 2 * MICROBATCHES and found["reduce_scatter", block] == 2 * MICROBATCHES
    for found in kept:
        assert found["all_gather", block] == found["reduce_scatter", block] == 2
        ends = {operation: numbers for operation, numbers in found if numbers != block}
        assert ends.keys() == {"all_gather", "reduce_scatter"} and found.total() == 6  # and the root once


def test_gradients_of_a_step_are_added_in_the_dtype_of_the_weights():
    """Weights gathered in bfloat16 have gradients of bfloat16: 32 micro-batches added up in that would lose digits."""
    settings = {"microbatches": 32, "computed_in": torch.bfloat16, "objective": autocast_objective, "dtype": torch.float32}
    work = lambda run: run.train(1).gradients()  # noqa: E731
    freed, kept = (on_ranks(work, "pp2_fsdp2", "llama", "sgd", "1f1b", **settings, **more) for more in ({}, KEPT))
    for mine, theirs in zip(kept, freed, strict=True):
        assert largest_difference(mine, theirs) < 1e-5
