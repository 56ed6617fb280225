"""Every layout, on both backends, with every feature that it must get along with, against one process: the parity matrix of chapter 06."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, MICROBATCHES, MUON, SMALL, batch_of
from step_records import STEPS, RunRecord

from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.config import ParallelConfig, parse_layout
from shared.totals import Batch

TWO = {"course": ("dp2", "dp2_zero1", "dp2_zero2", "fsdp2"), "torch": ("dp2", "dp2_zero1", "fsdp2")}
FOUR = {"course": ("dp4", "dp4_zero1", "dp4_zero2", "fsdp4", "dp2_fsdp2"), "torch": ("dp4", "dp4_zero1", "fsdp4", "dp2_fsdp2")}
TIED = ModelConfig(**vars(SMALL) | {"tie_word_embeddings": True, "attention_bias": True})
Difference = dict[str, float]  # loss, norm, gradients, weights -> the largest relative difference to one process


def one_rank_has_none(step: int, microbatch: int, config: ModelConfig) -> Batch:
    """The first quarter of the rows, which one rank of four has, holds no target; in the last step half of them."""
    batch = batch_of(step, microbatch, config)
    batch["targets"][: 6 if step == STEPS - 1 else 3] = -100
    return batch


def frozen(name: str) -> bool:
    return name.endswith("norm.weight") or "blocks.1.attention" in name


FEATURES = {  # settings of a `LayoutRun`; `activation_checkpointing` is the layout's
    "accumulation": {"microbatches": 3},
    "uneven counts": {"microbatches": 1, "batches": one_rank_has_none, "optimizer": ADAMW},
    "tied": {"config": TIED},
    "frozen": {"frozen": frozen},
    "full activation checkpointing": {"activation_checkpointing": "full"},
    "selective activation checkpointing": {"activation_checkpointing": "selective", "optimizer": ADAMW},
    "bfloat16": {
        "objective": autocast_objective(next_token_objective, "bfloat16"), "computed_in": torch.bfloat16,
        "dtype": torch.float32, "optimizer": ADAMW,
    },
    "float16": {
        "objective": autocast_objective(next_token_objective, "float16"), "computed_in": torch.float16,
        "dtype": torch.float32, "optimizer": ADAMW, "loss_scale": 64.0,
    },
}  # fmt: skip
EXACT = [name for name in FEATURES if name not in ("bfloat16", "float16")]


def trained(
    world: Communicator, layout: ParallelConfig, activation_checkpointing: str = "none", loss_scale: float = 0.0, **settings
) -> RunRecord:
    """Three steps, and what they gave. loss_scale: the first one; 0 for none."""
    scaler = LossScaler(LossScaleConfig(loss_scale)) if loss_scale else None
    layout = replace(layout, activation_checkpointing=activation_checkpointing, bucket_megabytes=0.02)
    return LayoutRun(world, layout, scaler=scaler, **settings).record()


def references(features=FEATURES) -> dict[str, RunRecord]:
    """One process, without recomputation or anything else of this chapter."""
    one_rank = SingleRankCommunicator()
    kept = {"activation_checkpointing": "none"}
    return {feature: trained(one_rank, ParallelConfig(), **FEATURES[feature] | kept) for feature in features}


def rounding(precision: str) -> Difference:
    """What 16 bits themselves change: one process in them against one process in float32."""
    wide = FEATURES[precision] | {"objective": next_token_objective, "computed_in": None}
    return difference(references([precision])[precision], trained(SingleRankCommunicator(), ParallelConfig(), **wide))


def difference(found: RunRecord, expected: RunRecord) -> Difference:
    as_dict = lambda steps: {str(step): torch.as_tensor(value) for step, value in enumerate(steps)}  # noqa: E731
    assert found.tokens == expected.tokens
    return {
        "loss": largest_difference(as_dict(found.losses), as_dict(expected.losses)),
        "norm": largest_difference(as_dict(found.norms), as_dict(expected.norms)),
        "gradients": max(largest_difference(*both) for both in zip(found.gradients, expected.gradients, strict=True)),
        "weights": largest_difference(found.weights, expected.weights),
    }


def matrix(
    world: Communicator, cases: list[tuple[str, str, str]], expected: dict[str, RunRecord]
) -> dict[tuple[str, str, str], Difference]:
    """(backend, layout, feature) -> how far this rank is from one process."""
    results = {}
    for backend, layout, feature in cases:
        found = trained(world, parse_layout(layout, ParallelConfig(backend=backend)), **FEATURES[feature])
        results[backend, layout, feature] = difference(found, expected[feature])
    return results


def cases_of(layouts: dict[str, tuple[str, ...]], features=FEATURES) -> list[tuple[str, str, str]]:
    return [(backend, layout, feature) for backend, names in layouts.items() for layout in names for feature in features]


def handed_over(world: Communicator, pairs: list[tuple[str, str]], expected: RunRecord) -> dict[tuple[str, str], float]:
    """(writer, reader), each `backend layout` -> how far the weights are from one process that was not interrupted."""
    results = {}
    for writer, reader in pairs:
        folder = Path(world.gather_objects(tempfile.mkdtemp() if world.rank == 0 else None)[0])
        spread = partial(LayoutRun, world, microbatches=MICROBATCHES, optimizer=MUON)
        spread(layout_of(writer)).train(STEPS - 1).save(folder)
        weights = spread(layout_of(reader), seed=7).restore(folder).train(1).weights()
        results[writer, reader] = largest_difference(weights, expected.weights)
    return results


def layout_of(words: str) -> ParallelConfig:
    backend, layout = words.split()
    return parse_layout(layout, ParallelConfig(backend=backend))
