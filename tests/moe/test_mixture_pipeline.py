"""Experts on the stages of a pipeline: every schedule, weight gradients apart, and stages that are balanced by what their experts hold."""

from dataclasses import replace

import pytest
from mixture_runs import MODEL, alone, on_ranks, require_same

from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.pipeline.balance import stage_costs

SCHEDULES = [
    ("pp2", "muon", {"pipeline_schedule": "zero_bubble"}),
    ("pp2_dp2", "adamw", {"pipeline_schedule": "zero_bubble", "activation_checkpointing": "selective"}),
    ("pp2_fsdp2", "muon", {"pipeline_schedule": "zero_bubble", "reshard_after_forward": False, "activation_checkpointing": "full"}),
    ("pp2_tp2_sp", "adamw", {"pipeline_schedule": "zero_bubble"}),
    ("pp2_dp2_ep2", "muon", {"pipeline_schedule": "zero_bubble"}),
    ("pp2", "adamw", {"pipeline_schedule": "gpipe"}),
    ("pp2", "muon", {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
    ("pp2", "adamw", {"pipeline_layers": "memory"}),
]


@pytest.mark.parametrize(("word", "optimizer", "settings"), SCHEDULES)
def test_every_schedule_trains_like_one_process(word, optimizer, settings):
    base = ParallelConfig(pipeline_parallel=2, **settings)
    require_same(on_ranks(parse_layout(word, base), optimizer), alone(optimizer))


@pytest.mark.parametrize("config", [MODEL, replace(MODEL, experts=None, qk_norm=True), replace(MODEL, tie_word_embeddings=True)])
def test_the_cost_of_a_stage_in_memory_is_what_its_modules_hold(config):
    model = TransformerModel(config, MIXTURE)
    size = lambda *modules: sum(p.numel() for module in modules for p in module.parameters())  # noqa: E731
    ends = size(model.embedding), size(model.head, model.stack.final_norm)
    assert stage_costs(config, "memory") == ([size(block) for block in model.stack.blocks.values()], *ends)
