"""Floor 7: what ranks of tensor, sequence and context parallelism hold and send is what the formulas say."""

from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from memory_table import ADAMW, ROWS, SMALL, batch, layout_of, measure, memory_measured, tables_of_chapter_07
from torch.utils.flop_counter import FlopCounterMode

from shared.course.paths import CHECKOUT
from shared.engine.metrics.flops import flops_per_token
from shared.loss import next_token_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.planning.activations import activations
from shared.parallel.planning.costs import total_cost
from shared.parallel.planning.memory import StepSizes, estimate_memory
from shared.parallel.planning.tensor_costs import context_exchanges, tensor_exchanges
from shared.parallel.tensor.axis import TensorParallel
from shared.trainer.models import RUN_AXES

SEQ = 40
MUON = OptimizerConfig("muon", lr=0.01)
GPT = replace(
    SMALL, norm="layer_norm", gated=False, position="learned", hidden_act="gelu_tanh", attention_bias=True, attention_output_bias=True,
    mlp_bias=True, max_position_embeddings=64,
)  # fmt: skip
FAMILIES = {
    "llama": SMALL,
    "gqa, tied": replace(SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "mqa": replace(SMALL, num_key_value_heads=1, attention_bias=True),
    "gpt2": GPT,
}
BUSY = partial(pytest.param, marks=pytest.mark.slow)  # the same in more pairs
LAYOUTS = ["tp2", "tp4_sp", *map(BUSY, ("tp2_sp", "tp4"))]
WITH_RINGS = ["cp2", *map(BUSY, ("cp4", "cp2_tp2_sp"))]
by_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
by_layout = pytest.mark.parametrize("word", LAYOUTS)


def near(measured: float, predicted: float) -> bool:
    return abs(measured - predicted) <= 0.05 * predicted


# What a rank holds.


def activations_of_rank(world, config: ModelConfig, layout: ParallelConfig, precision: str, sliced: bool, data: dict):
    dtype = None if precision == "float32" else torch.bfloat16
    parallel = apply_parallel(TransformerModel(config), Mesh(layout, world), ADAMW, dtype, axes=RUN_AXES)
    objective = autocast_objective(packed_next_token_objective if sliced else next_token_objective, precision)
    objective = parallel.objective(objective)
    return memory_measured.measured_activations(parallel.model, lambda: objective(parallel.model, data).loss_sum)


@by_family
@pytest.mark.parametrize("word", LAYOUTS + WITH_RINGS)
@pytest.mark.parametrize("precision", ["float32", BUSY("bfloat16")])
def test_activations_are_as_predicted(config, word, precision):
    """To the byte on rank 0, which has the most tokens of the vocabulary; the others have a few bytes less."""
    data = batch(seq=SEQ)
    places = torch.arange(SEQ).expand(ROWS, SEQ)
    packed = data | {"documents": places // 10, "positions": places % 10}
    cases = [("none", True, packed), ("full", True, data), ("none", False, data)]
    for recompute, sliced, given in cases[: 2 if word.startswith("cp") else 3]:
        layout = layout_of(word, recompute)
        first, *others = run_threads(activations_of_rank, layout.ranks, config, layout, precision, sliced, given)
        predicted = activations(config, recompute, ROWS, SEQ, precision, sliced, packed=given is packed, layout=layout)
        assert first == predicted
        assert all(near(each.peak, predicted.peak) for each in others)


def test_sequence_parallelism_cuts_the_stream_and_nothing_else():
    """What is left whole is what matrices cut by columns have gathered: two streams of 16 bits a layer, where the norms' inputs were
    cut."""
    whole, cut = (activations(SMALL, "none", 8, 64, "bfloat16", True, layout=layout_of(word)).peak for word in ("tp4", "tp4_sp"))
    streams = 2 * SMALL.num_hidden_layers + 1  # that norms keep, in float32
    assert whole - cut == streams * 4 * 8 * 64 * SMALL.hidden_size * 3 / 4


@pytest.mark.parametrize("word, zero", [("tp2", 0), ("dp2_tp2_sp", 1), ("fsdp2_tp2_sp", 0), ("dp2_cp2", 1)])
def test_each_rank_holds_what_is_predicted(word, zero):
    layout = replace(layout_of(word), zero=zero)
    for config, optimizer, precision in ((SMALL, MUON, "float32"), (GPT, ADAMW, "bfloat16")):
        predicted = estimate_memory(config, layout, optimizer, StepSizes(ROWS, SEQ, 2, precision))
        for found, _ in run_threads(measure, layout.ranks, layout, optimizer, 2, precision, config, SEQ):
            off = {kind: (found, expected) for kind, expected in vars(predicted).items() if not near(getattr(found, kind), expected)}
            assert not off


# What it sends.


def exchanged(config: ModelConfig, layout: ParallelConfig, optimizer=ADAMW, microbatches: int = 2, precision: str = "float32"):
    """(operation, axis) -> calls, bytes of a step: predicted, and measured as the ranks' mean."""
    predicted, found = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in tensor_exchanges(config, layout, optimizer, StepSizes(ROWS, SEQ, microbatches, precision)):
        predicted["calls", each.operation, each.axis] += each.calls
        predicted["bytes", each.operation, each.axis] += each.calls * each.bytes
    for _, trace in run_threads(measure, layout.ranks, layout, optimizer, microbatches, precision, config, SEQ):
        for kind, counts in (("calls", trace.calls()), ("bytes", trace.bytes())):
            for (operation, axis), count in counts.items():
                if axis.startswith("tp"):
                    found[kind, operation, axis] += count / layout.ranks
    return predicted, found


@by_family
@by_layout
@pytest.mark.parametrize("recompute", ["none", BUSY("full")])
def test_calls_and_bytes_are_as_predicted(config, word, recompute):
    predicted, found = exchanged(config, layout_of(word, recompute))
    assert predicted == found


@pytest.mark.parametrize("word", ["tp2", "tp2_sp"])
def test_in_16_bits_the_stream_travels_in_16_bits(word):
    """Also backward, where the sublayers' gradients are summed."""
    for recompute in ("none", "full"):
        predicted, found = exchanged(SMALL, layout_of(word, recompute), precision="bfloat16")
        assert predicted == found


@pytest.mark.parametrize("word, zero", [("tp2", 0), ("tp4_sp", 0), ("dp2_tp2", 1)])
@by_family
def test_muon_gathers_each_matrix(config, word, zero):
    predicted, found = exchanged(config, replace(layout_of(word), zero=zero), MUON, microbatches=1)
    assert predicted == found


def test_partial_gradients_are_shared_out_beside_full_sharding():
    """In units of a few parameters, so unevenly: the ranks' mean is predicted."""
    for config in (GPT, FAMILIES["mqa"], replace(SMALL, qk_norm=True)):
        predicted, found = exchanged(config, layout_of("fsdp2_tp2_sp"))
        assert {key for key in found if key[0] == "calls"} == {key for key in predicted if key[0] == "calls"}
        assert all(near(found[key], predicted[key]) for key in predicted)


@pytest.mark.parametrize("word", WITH_RINGS)
@pytest.mark.parametrize("recompute, precision", [("none", "float32"), ("full", "bfloat16"), BUSY("full", "float32")])
def test_the_ring_sends_what_is_predicted(word, recompute, precision):
    layout, config, predicted = layout_of(word, recompute), FAMILIES["gqa, tied"], Counter[tuple[str, str]]()
    for each in context_exchanges(config, layout, StepSizes(ROWS, SEQ, 2, precision)):
        predicted["calls", each.operation] += each.calls
        predicted["bytes", each.operation] += each.calls * each.bytes
    traces = [trace for _, trace in run_threads(measure, layout.ranks, layout, ADAMW, 2, precision, config, SEQ)]
    for operation in ("send", "all_gather"):
        assert sum(trace.calls()[operation, "cp"] for trace in traces) == predicted["calls", operation] * layout.ranks
        assert sum(trace.bytes()[operation, "cp"] for trace in traces) == predicted["bytes", operation] * layout.ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_sends_what_korthikanti_and_others_say(ranks):
    """8 b s h (t - 1) / t numbers a layer, with and without sequence parallelism."""
    step = StepSizes(3, 64, precision="bfloat16")
    config = replace(SMALL, num_attention_heads=8)
    for by_sequence in (False, True):
        layout = ParallelConfig(tensor_parallel=ranks, sequence_parallel=by_sequence)
        layers = [each for each in tensor_exchanges(config, layout, ADAMW, step) if each.part == "layers"]
        sent = total_cost(layers).bytes / config.num_hidden_layers
        assert sent == pytest.approx(2 * 8 * 3 * 64 * 64 * (ranks - 1) / ranks)


def test_without_tensor_parallelism_nothing_is_exchanged():
    assert tensor_exchanges(SMALL, parse_layout("dp2"), MUON, StepSizes(1, 8)) == []
    assert context_exchanges(SMALL, parse_layout("dp2"), StepSizes(1, 8)) == []


# What it computes.


@by_layout
def test_a_rank_computes_its_share_of_the_models_operations(word):
    """So utilisation is that of all ranks together: FLOPs per token, over the peak of all of them (`Throughput`)."""
    simulation = import_module("chapters.06_data_parallel.simulation")
    layout = layout_of(word)
    world = simulation.dry_run(layout.ranks)
    config = replace(SMALL, vocab_size=512, attention="eager")  # the kernel's operations are not counted on a CPU
    model = TransformerModel(config)
    TensorParallel().shape(model, Mesh(layout, world))
    with FlopCounterMode(display=False) as counter:
        next_token_objective(model, batch(seq=SEQ)).loss_sum.backward()
    expected = ROWS * SEQ * flops_per_token(config, SEQ) / layout.ranks
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_the_tables_on_the_chapters_page_are_what_the_command_prints():
    page = (CHECKOUT / "chapters" / "07_tensor_parallel" / "MEMORY.md").read_text(encoding="utf-8")
    assert "\n".join(tables_of_chapter_07()) in page
