"""Experts on the stages of a pipeline: every schedule, weight gradients apart, and stages that are balanced by what their experts hold."""

from dataclasses import replace

import pytest
import torch
from mixture_runs import MODEL, alone, on_ranks, require_same

from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.experts import ExpertLinear
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.pipeline.axis import stage_costs
from shared.parallel.pipeline.weight_gradients import add_weight_gradients, split_backward

SCHEDULES = [
    ("pp2", "muon", {"pipeline_schedule": "zero_bubble"}),
    ("pp2_dp2", "adamw", {"pipeline_schedule": "zero_bubble", "activation_checkpointing": "selective"}),
    ("pp2_fsdp2", "muon", {"pipeline_schedule": "zero_bubble", "reshard_after_forward": False, "activation_checkpointing": "full"}),
    ("pp2_tp2_sp", "adamw", {"pipeline_schedule": "zero_bubble"}),
    ("pp2_dp2_ep2", "muon", {"pipeline_schedule": "zero_bubble"}),
    ("pp2_dp2_ep2", "adamw", {"pipeline_schedule": "zero_bubble", "activation_checkpointing": "full"}),
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
    assert stage_costs(config, "memory") == (tuple(size(block) for block in model.stack.blocks.values()), *ends)


def test_gradients_in_two_parts_of_products_in_16_bits_are_those_of_one_backward_pass():
    """Rows come in float32 and autocast casts them: the second part casts them once more."""
    linear, counts, found = ExpertLinear(3, 16, 8, "loop"), torch.tensor([4, 0, 5]), []
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    for in_two_parts in (False, True):
        waiting = split_backward([linear]) if in_two_parts else []
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(rows, counts)
        out.sum().backward()
        add_weight_gradients(waiting)
        found.append(linear.weight.grad)
        linear.weight.grad = None
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(*found, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("implementation", ["grouped", "batched", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_in_two_parts_are_those_of_one_backward_pass(implementation, dtype):
    """Of an expert without rows too; the first part leaves no expert's gradient."""
    linear = ExpertLinear(4, 16, 8, implementation).to(dtype)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(9, 16, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
    upstream = torch.randn(9, 8, dtype=dtype, generator=torch.Generator().manual_seed(2))
    counts = torch.tensor([4, 0, 3, 2])
    linear(rows, counts).backward(upstream)
    whole, linear.weight.grad, rows.grad = (linear.weight.grad, rows.grad), None, None
    waiting = split_backward([linear])
    linear(rows, counts).backward(upstream)
    assert linear.weight.grad is None and len(waiting) == 1
    add_weight_gradients(waiting)
    for found, expected in zip((linear.weight.grad, rows.grad), whole, strict=True):
        torch.testing.assert_close(found, expected)
