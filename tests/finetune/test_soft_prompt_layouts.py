"""Prompt and prefix tuning in every layout: losses, gradients, norms and weights of three steps equal one process's, in float64."""

from functools import cache, partial

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, ROWS

from shared.data.packing import pack_documents
from shared.finetune import soft_prompts
from shared.finetune.config import AdapterConfig
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.trainer.models import RUN_AXES

N, SEQ, VOCABULARY = 3, 16, 31
SMALL = ModelConfig(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
    max_position_embeddings=SEQ, initializer_range=0.2,
)  # fmt: skip
LAYOUTS = ["dp2_zero1", "fsdp2", "tp2", "tp4", "tp2_sp", "cp2", "pp2", "fsdp2_tp2", "pp2_tp2"]
SLOW = ["dp2", "dp2_zero2", "cp2_tp2", "pp2_fsdp2", "dp2_fsdp2"]


def batches(step: int, microbatch: int, config: ModelConfig):
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    virtual, rows = torch.arange(N) + VOCABULARY, []
    for number in range(ROWS):
        lengths = (4, 5) if number % 2 else (9,)
        texts = [torch.cat([virtual, torch.randint(VOCABULARY, (length,), generator=generator)]) for length in lengths]
        row = pack_documents(texts, SEQ)
        read = (row["positions"] < N - 1 + number % 3) | (row["targets"] >= VOCABULARY)  # unevenly many targets
        rows.append(row | {"targets": row["targets"].masked_fill(read, -100)})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def prepared(kind: str, model):
    soft_prompts.attach_soft_prompt(model, AdapterConfig(kind=kind, virtual_tokens=N), seed=3)
    return model.double()


def observed(kind: str, layout: ParallelConfig, world):
    settings = {"batches": batches, "axes": RUN_AXES, "prepare": partial(prepared, kind)}
    return LayoutRun(world, layout, SMALL, ADAMW, packed_next_token_objective, **settings).record()


@cache
def alone(kind: str):
    return observed(kind, ParallelConfig(), SingleRankCommunicator())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_training_equals_one_process(name, kind, recompute):
    layout = parse_layout(name, ParallelConfig(activation_checkpointing=recompute))
    records, one = run_threads(partial(observed, kind, layout), layout.ranks), alone(kind)
    trained = {name for name, gradient in one.gradients[0].items() if gradient is not None}
    assert len(trained) == (1 if kind == "prompt" else 2)
    weights = {name: tensor for record in records for name, tensor in record.weights.items()}
    assert largest_difference(weights, one.weights) < 1e-9
    for step in range(3):
        found = {name: g for record in records for name, g in record.gradients[step].items() if g is not None}
        assert largest_difference(found, {name: one.gradients[step][name] for name in trained}) < 1e-9
        for record in records:
            assert record.tokens[step] == one.tokens[step]
            torch.testing.assert_close(record.losses[step], one.losses[step], rtol=1e-9, atol=0)
            torch.testing.assert_close(record.norms[step], one.norms[step], rtol=1e-9, atol=0)
