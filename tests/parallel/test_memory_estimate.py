"""Floor 6: what a rank's memory holds is what the formulas say, within 5 %, in every layout, with and without recomputation."""

from dataclasses import replace

import pytest
import torch
from memory_table import ADAMW, LAYOUTS, ROWS, SEQ, SMALL, batch, compared, memory_measured, table
from storage_peak import allocated_in_forward

from shared.course.paths import CHECKOUT
from shared.model.chunked_loss import packed_next_token_objective
from shared.loss import next_token_objective
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.planning.activations import activations, saved_per_token
from shared.parallel.planning.memory import StepSizes, estimate_memory

WITHIN = 0.05
FAMILIES = {
    "llama": SMALL,
    "grouped queries": replace(SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": replace(
        SMALL, norm="layer_norm", gated=False, position="learned", hidden_act="gelu_tanh", attention_bias=True, mlp_bias=True,
        max_position_embeddings=64,
    ),
}  # fmt: skip
OBJECTIVES = {False: next_token_objective, True: packed_next_token_objective}


def near(measured: float, predicted: float) -> bool:
    return abs(measured - predicted) <= WITHIN * predicted


# Activations.


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_as_predicted(config, precision):
    for sliced, objective in OBJECTIVES.items():
        for how in ("none", "full"):
            model = TransformerModel(config)
            apply_activation_checkpointing(model, how)
            measured = memory_measured.measured_activations(
                model,
                lambda: autocast_objective(objective, precision)(model, batch()).loss_sum,  # noqa: B023
            )
            predicted = activations(config, how, ROWS, SEQ, precision, sliced)
            assert near(measured.after_forward, predicted.after_forward) and near(measured.peak, predicted.peak)
            if how == "none":
                assert measured == predicted  # to the byte


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_packed_rows_keep_their_masks(config, precision):
    data = batch()
    places = torch.arange(SEQ).expand(ROWS, SEQ)
    data |= {"documents": places // 10, "positions": places % 10}
    for how in ("none", "full"):
        model = TransformerModel(config)
        apply_activation_checkpointing(model, how)
        measured = memory_measured.measured_activations(
            model,
            lambda: autocast_objective(packed_next_token_objective, precision)(model, data).loss_sum,  # noqa: B023
        )
        predicted = activations(config, how, ROWS, SEQ, precision, True, packed=True)
        assert near(measured.after_forward, predicted.after_forward) and near(measured.peak, predicted.peak)


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_the_allocator_says_the_same(how, tmp_path, capfd):
    model = TransformerModel(SMALL)
    apply_activation_checkpointing(model, how)
    measured = allocated_in_forward(model, packed_next_token_objective, batch(16), tmp_path / "trace.json")
    assert near(measured, activations(SMALL, how, 16, SEQ, "float32", True).after_forward)


@pytest.mark.parametrize("word", ["one", "fsdp2"])
def test_what_the_hooks_cannot_see_is_not_measured(word):
    """Selective recomputation keeps results in a cache of PyTorch's. Counted without them it would seem to keep no more than `blocks`."""

    def measure(world):
        layout = replace(parse_layout(word), activation_checkpointing="selective")
        spread = apply_parallel(TransformerModel(SMALL), Mesh(layout, world), ADAMW)
        with pytest.raises(ValueError, match="cache of PyTorch's, which this meter cannot see"):
            memory_measured.measured_activations(spread.model, lambda: next_token_objective(spread.model, batch()).loss_sum)

    run_threads(measure, parse_layout(word).ranks)


def test_the_coefficients_are_korthikantis_where_the_operations_are():
    """34 s b h of a layer, less two masks of dropout, in 16 bits throughout; their attention holds [Q, K] matrices, which ours does not."""
    gpt = replace(FAMILIES["gpt2"], intermediate_size=4 * 64).resolved()
    numbers = saved_per_token(gpt)
    assert numbers["float32"] == 4 + 4  # the fused kernel's sums, and two norms' statistics
    assert 2 * (numbers["stream"] + numbers["products"]) == (34 - 2) * gpt.hidden_size


def test_selective_recomputation_lies_between_and_recomputing_blocks_holds_one_at_a_time():
    none, selective, blocks = (activations(SMALL, how, 8, 64, "float32", True) for how in ("none", "selective", "full"))
    assert blocks.after_forward < selective.after_forward < none.after_forward
    assert blocks.peak < selective.peak < none.peak
    deeper = activations(replace(SMALL, num_hidden_layers=40), "full", 8, 64, "float32", True)
    assert deeper.peak - blocks.peak == 36 * 8 * 64 * 64 * 4  # one input for each block more


def test_a_model_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="hidden_dropout"):
        activations(replace(SMALL, hidden_dropout=0.1), "none", 1, 8, "float32", True)


# Weights, gradients, state.


def require_near(layout: ParallelConfig, **settings) -> None:
    for kind, (predicted, measured) in compared(layout, **settings).items():
        assert near(measured, predicted), f"{kind}: {measured} bytes measured, {predicted:.0f} predicted"


WORDS = ["one", "dp2", "dp2_zero1", "dp2_zero2", "fsdp2", "dp4", "dp4_zero1", "dp4_zero2", "fsdp4", "dp2_fsdp2"]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", WORDS)
def test_each_rank_holds_what_is_predicted(layout, recompute):
    require_near(replace(parse_layout(layout), activation_checkpointing=recompute))


def test_the_table_on_the_chapters_page_is_what_the_command_prints():
    """Two micro-batches, so gradients wait. Bytes are the same on every machine, and none is 5 % off."""
    lines = list(table(list(LAYOUTS)))
    page = (CHECKOUT / "chapters" / "06_data_parallel" / "MEMORY.md").read_text(encoding="utf-8")
    assert "\n".join(lines[:-2]) in page and lines[-1] in page
    assert float(lines[-1].split()[-2]) < 100 * WITHIN


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", ["one", "dp2_zero1", "fsdp2"])
def test_in_half_precision_and_with_muon(layout, family):
    require_near(parse_layout(layout), optimizer=OptimizerConfig("muon", lr=0.01), precision="bfloat16", config=FAMILIES[family])


def test_what_fsdp_gathers_ahead_and_keeps():
    for changes in ({"prefetch": 0}, {"prefetch": 2}, {"reshard_after_forward": False}):
        require_near(replace(parse_layout("fsdp2"), **changes))


def test_cutting_halves_what_it_cuts_and_nothing_else():
    layouts = ("dp2", "dp2_zero1", "dp2_zero2", "fsdp2")
    rows = {name: estimate_memory(SMALL, parse_layout(name), ADAMW, StepSizes(ROWS, SEQ, microbatches=2)) for name in layouts}
    whole = 4 * sum(parameter_counts(SMALL).values())
    assert [row.weights / whole for row in rows.values()] == [1, 1, 1, 0.5]
    assert [row.gradients / whole for row in rows.values()] == [1, 1, 0.5, 0.5]
    assert [row.optimizer / whole for row in rows.values()] == [2, 1, 1, 1]
    assert len({row.activations for row in rows.values()}) == 1
    assert all(row.total == sum(vars(row).values()) for row in rows.values())


def test_a_memory_meter_that_counts_twice_or_never_frees_is_noticed():
    """The control of the measurement: weights and views of one storage cost nothing more, and after the backward pass nothing is kept."""
    model = TransformerModel(SMALL)
    with memory_measured.ActivationMeter(model) as meter:
        loss = next_token_objective(model, batch()).loss_sum
        kept = meter.now
        assert kept == meter.peak > 0
        loss.backward()
        assert meter.now == 0
        next_token_objective(model, batch())
        assert meter.now == 0  # let go with the graph
