"""Floor 6: what a rank's memory holds is what the formulas say, within 5 %, in every layout, with and without recomputation."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shared.data.objectives import packed_next_token_objective
from shared.loop import accumulate_gradients, train_step
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.sliced_loss import sliced_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import in_precision
from shared.optim.updater import Update
from shared.parallel.apply import apply_parallel
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.memory import Held, activations, held, kept_of_token, memory_table
from shared.parallel.memory_measured import ActivationMeter, measured_activations, optimizer_bytes, storage_bytes, weight_bytes
from shared.parallel.mesh import Mesh
from shared.parallel.recompute import apply_recompute
from shared.parallel.threads import run_threads

WITHIN = 0.05
SMALL = ModelConfig(vocab_size=509, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=172)
FAMILIES = {
    "llama": SMALL,
    "grouped queries": replace(SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": replace(
        SMALL, norm="layer_norm", gated=False, position="learned", hidden_act="gelu_tanh", attention_bias=True, mlp_bias=True,
        max_position_embeddings=64,
    ),
}  # fmt: skip
ADAMW = OptimizerConfig("adamw", lr=0.01)
OBJECTIVES = {False: next_token_objective, True: sliced_next_token_objective}
ROWS, SEQ = 3, 37


def batch(rows: int = ROWS) -> dict:
    ids = torch.randint(SMALL.vocab_size, (rows, SEQ + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def near(measured: float, predicted: float) -> bool:
    return abs(measured - predicted) <= WITHIN * predicted


# Activations.


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_as_predicted(config, precision):
    for sliced, objective in OBJECTIVES.items():
        for how in ("none", "blocks"):
            model = TransformerModel(config)
            apply_recompute(model, how)
            measured = measured_activations(model, lambda: in_precision(objective, precision)(model, batch()).loss_sum)  # noqa: B023
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
    for how in ("none", "blocks"):
        model = TransformerModel(config)
        apply_recompute(model, how)
        measured = measured_activations(model, lambda: in_precision(packed_next_token_objective, precision)(model, data).loss_sum)  # noqa: B023
        predicted = activations(config, how, ROWS, SEQ, precision, True, packed=True)
        assert near(measured.after_forward, predicted.after_forward) and near(measured.peak, predicted.peak)


def allocated_in_forward(model, objective, data, path) -> int:
    """Bytes that the CPU's allocator has given out during a forward pass and not taken back: another way of measuring."""
    objective(model, data).loss_sum.backward()
    gc.collect()  # what other tests left in circles would be taken back some time in between
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            totals = objective(model, data)
            with record_function("forward is over"):
                pass
            totals.loss_sum.backward()
    finally:
        gc.enable()
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (end,) = (event["ts"] for event in events if event.get("name") == "forward is over")
    return sum(event["args"]["Bytes"] for event in events if event.get("name") == "[memory]" and event["ts"] < end)


@pytest.mark.parametrize("how", ["none", "blocks", "selective"])
def test_the_allocator_says_the_same(how, tmp_path, capfd):
    model = TransformerModel(SMALL)
    apply_recompute(model, how)
    measured = allocated_in_forward(model, sliced_next_token_objective, batch(16), tmp_path / "trace.json")
    assert near(measured, activations(SMALL, how, 16, SEQ, "float32", True).after_forward)


def test_the_coefficients_are_korthikantis_where_the_operations_are():
    """34 s b h of a layer, less two masks of dropout, in 16 bits throughout; their attention holds [Q, K] matrices, which ours does not."""
    gpt = replace(FAMILIES["gpt2"], intermediate_size=4 * 64).resolved()
    numbers = kept_of_token(gpt)
    assert numbers["float32"] == 4 + 4  # the fused kernel's sums, and two norms' statistics
    assert 2 * (numbers["stream"] + numbers["products"]) == (34 - 2) * gpt.hidden_size


def test_selective_recomputation_lies_between_and_recomputing_blocks_holds_one_at_a_time():
    none, selective, blocks = (activations(SMALL, how, 8, 64, "float32", True) for how in ("none", "selective", "blocks"))
    assert blocks.after_forward < selective.after_forward < none.after_forward
    assert blocks.peak < selective.peak < none.peak
    deeper = activations(replace(SMALL, num_hidden_layers=40), "blocks", 8, 64, "float32", True)
    assert deeper.peak - blocks.peak == 36 * 8 * 64 * 64 * 4  # one input for each block more


def test_a_model_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="hidden_dropout"):
        activations(replace(SMALL, hidden_dropout=0.1), "none", 1, 8, "float32", True)


# Weights, gradients, state.


def measure(world, layout: ParallelConfig, optimizer: OptimizerConfig, microbatches: int, precision: str) -> Held:
    """What a rank holds of a step, each part where it is largest; gradients after the backward pass, or, where there are several
    micro-batches, as the last one begins."""
    parallel = apply_parallel(TransformerModel(SMALL), Mesh(layout, world), optimizer, None if precision == "float32" else torch.bfloat16)
    stepper, objective = build_optimizer(parallel.optimized, optimizer), in_precision(sliced_next_token_objective, precision)
    pieces, stack = list(parallel.optimized.parameters()), parallel.model.stack
    weights, gradients, gathered = weight_bytes(parallel.model, parallel.optimized), [], [0]
    note_gradients = lambda *_: gradients.append(storage_bytes(p.grad for p in [*parallel.model.parameters(), *pieces]))  # noqa: E731
    stack.register_forward_pre_hook(note_gradients)
    for block in stack.blocks.values():
        block.register_forward_pre_hook(lambda *_: gathered.append(getattr(parallel, "gathered_bytes", 0)))
    if not layout.reshard_after_forward:
        stack.register_forward_hook(lambda *_: gathered.append(parallel.gathered_bytes))
    update = Update(1.0, norm=parallel.norm)

    def noted_update(model, optimizer, token_count):
        if microbatches == 1:
            note_gradients()
        update(model, optimizer, token_count)

    with ActivationMeter(parallel.model) as meter:
        train_step(
            parallel.model, stepper, [batch() for _ in range(microbatches)], objective, parallel.runner(accumulate_gradients),
            parallel.reducer, parallel.updater(noted_update),
        )  # fmt: skip
    assert meter.now == 0
    return Held(weights, max(gathered), gradients[-1], optimizer_bytes(stepper), meter.peak)


def require_near(found: Held, expected: Held) -> None:
    for part, value in vars(expected).items():
        assert near(getattr(found, part), value), f"{part}: {getattr(found, part)} bytes measured, {value:.0f} predicted"


def compare(layout: ParallelConfig, optimizer=ADAMW, microbatches: int = 1, precision: str = "float32") -> Held:
    expected = held(SMALL, layout, optimizer, rows=ROWS, seq=SEQ, microbatches=microbatches, precision=precision)
    for found in run_threads(measure, layout.ranks, layout, optimizer, microbatches, precision):
        require_near(found, expected)
    return expected


LAYOUTS = ["one", "dp2", "dp2_zero1", "dp2_zero2", "fsdp2", "dp4", "dp4_zero1", "dp4_zero2", "fsdp4", "dp2_fsdp2"]


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_holds_what_is_predicted(layout, recompute):
    compare(replace(parse_layout(layout), recompute=recompute))


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "dp2_zero2", "fsdp2"])
def test_while_micro_batches_add_up(layout):
    compare(parse_layout(layout), microbatches=2)


@pytest.mark.parametrize("layout", ["one", "dp2_zero1", "fsdp2"])
def test_in_half_precision_and_with_muon(layout):
    compare(parse_layout(layout), OptimizerConfig("muon", lr=0.01), precision="bfloat16")


def test_what_fsdp_gathers_ahead_and_keeps():
    for changes in ({"prefetch": 0}, {"prefetch": 2}, {"reshard_after_forward": False}):
        compare(replace(parse_layout("fsdp2"), **changes))


def test_cutting_halves_what_it_cuts_and_nothing_else():
    layouts = ("dp2", "dp2_zero1", "dp2_zero2", "fsdp2")
    rows = {name: held(SMALL, parse_layout(name), ADAMW, rows=ROWS, seq=SEQ, microbatches=2) for name in layouts}
    whole = 4 * sum(parameter_counts(SMALL).values())
    assert [row.weights / whole for row in rows.values()] == [1, 1, 1, 0.5]
    assert [row.gradients / whole for row in rows.values()] == [1, 1, 0.5, 0.5]
    assert [row.optimizer / whole for row in rows.values()] == [2, 1, 1, 1]
    assert len({row.activations for row in rows.values()}) == 1
    header, *lines = memory_table(rows).splitlines()
    assert header.split() == [*vars(rows["dp2"]), "total"] and [line.split()[0] for line in lines] == list(rows)
    assert float(lines[0].split()[-1]) == pytest.approx(rows["dp2"].total / 1e6, abs=0.01)


def test_a_meter_that_counted_twice_or_never_let_go_would_be_seen():
    """The control of the measurement: weights and views of one storage cost nothing more, and after the backward pass nothing is kept."""
    model = TransformerModel(SMALL)
    with ActivationMeter(model) as meter:
        loss = next_token_objective(model, batch()).loss_sum
        kept = meter.now
        assert kept == meter.peak > 0
        loss.backward()
        assert meter.now == 0
        next_token_objective(model, batch())
        assert meter.now == 0  # let go with the graph
