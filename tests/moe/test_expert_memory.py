"""Floor 9: what a rank holds of a mixture of experts is what the formulas say: to the byte, but for the optimizer's step counts."""

from dataclasses import replace

import pytest
import torch
from expert_cost_table import MODELS, OTHERS, by_rank, measured_imbalance
from memory_table import ADAMW, ROWS, SMALL, batch, memory_measured
from storage_peak import allocated_in_forward

from shared.model.chunked_loss import packed_next_token_objective
from shared.model.counting import count_parameters
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.parallel.config import parse_layout
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.planning.activations import Part, activations
from shared.parallel.planning.memory import StepSizes, part_counts
from shared.parallel.planning.pipeline_costs import estimate_ranks

MUON = OptimizerConfig("muon", lr=0.01)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["none", "full"])
def test_activations_of_a_mixture_are_as_predicted_to_the_byte(name, precision, how):
    model = TransformerModel(MODELS[name], MIXTURE)
    apply_activation_checkpointing(model, how)
    objective = autocast_objective(packed_next_token_objective, precision)
    measured = memory_measured.measured_activations(model, lambda: objective(model, batch()).loss_sum)
    assert measured == activations(MODELS[name], how, ROWS, 37, precision, True)


def test_the_z_loss_alone_keeps_the_mask_of_tokens_that_count():
    config = replace(MODELS["mixtral"], experts=replace(MODELS["mixtral"].experts, balance_coefficient=0.0))
    model = TransformerModel(config, MIXTURE)
    measured = memory_measured.measured_activations(model, lambda: packed_next_token_objective(model, batch()).loss_sum)
    assert config.experts.has_losses and measured == activations(config, "none", ROWS, 37, "float32", True)


def test_the_allocator_says_the_same_of_selective_recomputation(tmp_path):
    """Which keeps the experts' products in a cache that hooks do not see."""
    model = TransformerModel(MODELS["deepseek"], MIXTURE)
    apply_activation_checkpointing(model, "selective")
    measured = allocated_in_forward(model, packed_next_token_objective, batch(16), tmp_path / "trace.json")
    predicted = activations(MODELS["deepseek"], "selective", 16, 37, "float32", True).after_forward
    assert abs(measured - predicted) < 0.02 * predicted


LAYOUTS = [
    ("dp2_zero1", "mixtral", "float32", MUON), ("fsdp2", "deepseek", "bfloat16", ADAMW), ("pp2", "deepseek", "float32", ADAMW),
    ("dp2_ep2", "mixtral", "bfloat16", ADAMW), ("dp4_ep2_zero1", "deepseek", "float32", ADAMW), ("fsdp2_ep2", "olmoe", "float32", MUON),
    ("fsdp4_ep2", "deepseek", "bfloat16", ADAMW), ("dp2_tp2_sp_ep2", "mixtral", "float32", ADAMW),
    ("pp2_fsdp2_ep2", "deepseek", "float32", ADAMW),
]  # fmt: skip


@pytest.mark.parametrize("word, name, precision, optimizer", LAYOUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_rank_holds_what_is_predicted(word, name, precision, optimizer):
    """A single micro-batch, whose experts' load is told; a pipeline's ranks have several in flight, with another load each."""
    layout, config = parse_layout(word), MODELS[name]
    step = StepSizes(ROWS, 48, 1 if layout.pipeline_parallel == 1 else 4, precision)
    for rank, found in enumerate(by_rank(config, layout, optimizer, step)):
        known = replace(step, imbalance=measured_imbalance(found, layout, step, config))
        predicted = estimate_ranks(config, layout, optimizer, known)
        expected = predicted[rank * len(predicted) // layout.ranks]
        for kind, value in vars(found.held).items():
            share = 1e-12 if kind in ("weights", "gathered", "activations") else 2e-3  # state counts steps, gradients of shards are padded
            if layout.tensor_parallel > 1:
                share = 2e-3  # 509 tokens do not divide by 2
            if layout.pipeline_parallel > 1 and layout.expert_parallel > 1 and kind == "activations":
                share = 0.05
            assert value == pytest.approx(getattr(expected, kind), rel=share), (rank, kind)


def test_what_part_w_of_an_expert_needs_is_counted():
    """Under zero bubble inputs and gradients of the experts' rows wait with those of everything else, to the byte, but for the ends of each
    expert's rows in three products, which are counted and not kept: of a layer of two micro-batches, or of two layers of one."""
    layout, config = replace(parse_layout("pp2"), pipeline_schedule="zero_bubble"), MODELS["deepseek"]
    step, ends = StepSizes(ROWS, 48, 4), 4 * config.experts.num_experts * 3
    for found, expected in zip(by_rank(config, layout, ADAMW, step), estimate_ranks(config, layout, ADAMW, step), strict=True):
        assert found.held.activations == expected.activations - 2 * ends


def test_a_stage_counts_its_own_blocks():
    """The first block is dense and has fewer parameters than the others, on whichever stage it is."""
    config = MODELS["deepseek"].resolved()
    model = TransformerModel(config, MIXTURE)
    for part in (Part((0, 1), head=False), Part((2, 3), embedding=False), Part((0, 2)), Part(())):
        model.stack.blocks.clear()
        whole = TransformerModel(config, MIXTURE)
        for block in part.blocks:
            model.stack.blocks[str(block)] = whole.stack.blocks[str(block)]
        model.embedding = whole.embedding if part.embedding else torch.nn.Identity()
        model.head, model.stack.final_norm = (whole.head, whole.stack.final_norm) if part.head else (None, None)
        assert part_counts(config, part) == count_parameters(model)


def test_dropped_choices_are_counted_as_if_they_were_kept():
    config = OTHERS["with a capacity"]
    model = TransformerModel(config, MIXTURE)
    measured = memory_measured.measured_activations(model, lambda: packed_next_token_objective(model, batch()).loss_sum)
    predicted = activations(config, "none", ROWS, 37, "float32", True)
    assert 0.8 * predicted.peak < measured.peak < predicted.peak


def test_batched_products_have_no_formula():
    with pytest.raises(ValueError, match="no formula .* this experts"):
        activations(OTHERS["batched"], "none", 1, 8, "float32", True)


def test_experts_keep_as_many_times_the_rows_as_a_token_has_choices():
    """A mixture of k experts as wide as 1 / k of the dense layer keeps k copies of the rows more: entering, and coming back."""
    dense = activations(SMALL, "none", ROWS, 48, "float32", True).peak
    sparse = activations(OTHERS["as wide as dense"], "none", ROWS, 48, "float32", True).peak
    tokens, k = 4 * ROWS * 48, 4  # of each of the 4 blocks
    places_and_scores = tokens * (24 * k + 4 * (8 + 2 * k + 1) + 1)
    ends = 4 * 4 * 8 * 3  # of each of 8 experts' rows in three products
    assert sparse - dense == tokens * 4 * 64 * 2 * k + places_and_scores + ends
