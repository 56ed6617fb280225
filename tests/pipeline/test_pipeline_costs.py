"""Floor 8: what each stage holds, keeps in flight and sends in a step is what the formulas say, whatever the schedule."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from memory_table import ADAMW, SMALL
from pipeline_cost_table import STEP, TIED, by_rank, layout_of, memory_and_messages, near, schedules_table

from shared.course.paths import CHECKOUT
from shared.model.counting import parameter_counts
from shared.optim.config import OptimizerConfig
from shared.parallel.config import parse_layout
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import validate
from shared.parallel.planning.activations import Activations, activations
from shared.parallel.planning.memory import StepSizes, estimate_memory, part_counts
from shared.parallel.planning.pipeline_costs import (
    chunk_parts, estimate_ranks, held_parts, hidden_bytes, most_in_flight, pipeline_exchanges, split_bytes, step_exchanges,
)  # fmt: skip

MUON = OptimizerConfig("muon", lr=0.01)
GPT = replace(
    TIED, norm="layer_norm", gated=False, position="learned", hidden_act="gelu_tanh", attention_bias=True, attention_output_bias=True,
    mlp_bias=True, max_position_embeddings=64,
)  # fmt: skip
BUSY = partial(pytest.param, marks=pytest.mark.slow)  # the same in more pairs
CASES = [
    ("pp2", "1f1b", "none", "float32", TIED, ADAMW),
    ("pp4", "gpipe", "none", "float32", GPT, ADAMW),
    ("pp2", "interleaved", "full", "float32", TIED, MUON),
    ("pp4", "zero_bubble", "none", "float32", SMALL, ADAMW),
    ("pp2_tp2", "1f1b", "none", "bfloat16", TIED, MUON),
    ("dp2_pp2", "1f1b", "none", "float32", GPT, ADAMW),
    ("fsdp2_pp2", "1f1b", "none", "bfloat16", TIED, ADAMW),
    ("fsdp2_pp2_keep", "zero_bubble", "none", "float32", TIED, ADAMW),
    ("pp2", "zero_bubble", "none", "float32", GPT, ADAMW),
    BUSY("pp2_tp2_sp", "interleaved", "none", "float32", TIED, ADAMW),
    BUSY("pp2_tp2", "zero_bubble", "none", "float32", SMALL, MUON),
    BUSY("pp2_cp2", "1f1b", "none", "float32", TIED, ADAMW),
    BUSY("fsdp2_pp2_keep", "1f1b", "none", "float32", TIED, ADAMW),
    *(BUSY(layout, schedule, "none", "float32", TIED, ADAMW) for layout in ("pp2", "pp4", "dp2_pp2", "fsdp2_pp2", "pp2_tp2_sp")
      for schedule in ("gpipe", "1f1b")),
    BUSY("pp4", "1f1b", "full", "bfloat16", GPT, MUON),
    BUSY("pp2", "zero_bubble", "none", "bfloat16", TIED, ADAMW),
    BUSY("dp2_pp2", "zero_bubble", "none", "float32", TIED, ADAMW),
    BUSY("fsdp2_pp2", "interleaved", "none", "float32", SMALL, ADAMW),
    BUSY("pp2_tp2_sp", "1f1b", "full", "bfloat16", TIED, ADAMW),
    BUSY("dp2_pp2_zero1", "gpipe", "none", "float32", SMALL, MUON),
]  # fmt: skip


@pytest.mark.parametrize("word, schedule, recompute, precision, config, optimizer", CASES)
def test_each_stage_holds_and_sends_what_is_predicted(word, schedule, recompute, precision, config, optimizer):
    """Storages within 5 % (to the byte but for tensors that do not divide), every call, and the bytes of each operation."""
    layout, step = layout_of(word, schedule, recompute), replace(STEP, precision=precision)
    predicted, of_stage = estimate_ranks(config, layout, optimizer, step), layout.ranks // layout.pipeline_parallel
    for rank, (held, trace) in enumerate(by_rank(layout, step, config, optimizer)):
        stage = rank // of_stage
        kinds = {kind: (found, getattr(predicted[stage], kind)) for kind, found in vars(held).items()}
        assert not {kind: both for kind, both in kinds.items() if not near(*both)}, f"rank {rank}"
        calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for each in step_exchanges(config, layout, optimizer, step, stage):
            calls[each.operation, each.axis] += each.calls
            sizes[each.operation, each.axis] += each.calls * each.bytes
        traced = {key: count for key, count in trace.calls().items() if key[1].startswith(("pp", "tp"))}
        assert traced == calls
        assert {key: size for key, size in sizes.items() if not near(trace.bytes()[key], size)} == {}
        exact = {key for key in calls if key[0] in ("send", "receive", "broadcast")}
        assert all(trace.bytes()[key] == sizes[key] for key in exact)


@pytest.mark.parametrize("name, ranks, chunks", [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 4, 2), ("zero_bubble", 4, 1)])
def test_in_flight_are_as_many_micro_batches_as_the_schedule_keeps(name, ranks, chunks):
    """By `validate`'s count; under 1F1B stages minus rank, under GPipe all."""
    microbatches = 8
    schedule = make_schedule(name, ranks, microbatches, chunks)
    marks = validate(schedule, microbatches, chunks)
    found = [most_in_flight(actions, chunks * [Activations(1, 1)], chunks * [0], chunks * [1]) for actions in schedule]
    assert found == marks
    if name in ("1f1b", "gpipe"):
        assert found == [microbatches if name == "gpipe" else ranks - rank for rank in range(ranks)]


def test_recomputation_adds_one_chunk_to_what_is_in_flight():
    (actions,) = make_schedule("gpipe", 1, 3)
    assert most_in_flight(actions, [Activations(10, 14)], [2], [0]) == 3 * 12 + 4


@pytest.mark.parametrize("config", [SMALL, TIED, GPT], ids=["untied", "tied", "gpt2"])
@pytest.mark.parametrize("word, schedule", [("pp2", "1f1b"), ("pp4", "gpipe"), ("pp2", "interleaved")])
def test_stages_have_the_model_together_and_a_tied_weight_twice(config, word, schedule):
    parts = held_parts(config, layout_of(word, schedule))
    whole, counts = parameter_counts(config), [part_counts(config, part) for part in parts]
    again = config.tie_word_embeddings * config.vocab_size * config.hidden_size
    assert {role: sum(each[role] for each in counts) for role in whole} == whole | {"embedding": whole["embedding"] + again}


def test_without_a_pipeline_the_formulas_are_those_of_one_stage():
    layout, step = parse_layout("dp2_zero1"), StepSizes(3, 48, 2)
    assert estimate_ranks(SMALL, layout, ADAMW, step) == [estimate_memory(SMALL, layout, ADAMW, step)]
    assert pipeline_exchanges(SMALL, layout, step) == []
    assert step_exchanges(SMALL, layout, ADAMW, step) == []


def test_messages_cross_each_border_of_stages_once_forward_and_once_back():
    """However many stages: 2 (v p - 1) m messages are sent in all."""
    for word, schedule, stages in (("pp4", "1f1b", 4), ("pp2", "interleaved", 4), ("pp2", "zero_bubble", 2)):
        layout = layout_of(word, schedule)
        found = [pipeline_exchanges(SMALL, layout, STEP, rank) for rank in range(layout.pipeline_parallel)]
        for operation in ("send", "receive"):
            calls = sum(each.calls for exchanges in found for each in exchanges if each.operation == operation)
            assert calls == 2 * (stages - 1) * STEP.microbatches


@pytest.mark.slow
def test_the_tables_on_the_chapters_page_are_what_the_command_prints():
    page = (CHECKOUT / "chapters" / "08_pipeline_parallel" / "MEMORY.md").read_text(encoding="utf-8")
    for table in "\n".join([*memory_and_messages(), "", *schedules_table()]).split("\n\n"):
        assert table in page


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
@pytest.mark.parametrize("how", ["none", "full"])
def test_a_step_of_many_micro_batches_is_estimated_from_its_first_ones(schedule, chunks, how):
    """Which would not fit into memory as a schedule, or take hours: the estimate is what the whole schedule gives."""
    config = replace(SMALL, num_hidden_layers=8)
    layout = replace(parse_layout("pp4"), pipeline_schedule=schedule, pipeline_chunks=chunks, activation_checkpointing=how)
    for microbatches in (12, 16 * chunks + 4, 16 * chunks + 8, 100, 101):
        if schedule == "interleaved" and microbatches % 4:
            continue
        step, whole = replace(STEP, microbatches=microbatches), make_schedule(schedule, 4, microbatches, chunks)
        for rank, (found, parts) in enumerate(zip(estimate_ranks(config, layout, ADAMW, step), chunk_parts(config, layout), strict=True)):
            each = [activations(config, how, step.rows, step.seq, "float32", True, False, layout, part) for part in parts]
            sent = [0 if part.head else hidden_bytes(config, layout, step) for part in parts]
            split = [part.layers * split_bytes(config, layout, step, 0) for part in parts]
            assert found.activations == most_in_flight(whole[rank], each, sent, split), (microbatches, rank)
    billions = estimate_ranks(config, layout, ADAMW, replace(STEP, microbatches=4 * 10**9))
    assert (billions[0].activations > 1e12) == (schedule == "gpipe")
