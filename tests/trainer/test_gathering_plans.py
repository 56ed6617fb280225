"""The planner counts what a rollout gathers: all weights, or block by block where these do not fit."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from test_planner import SMALL, config_of

from shared.finetune.config import AdapterConfig
from shared.model.counting import block_counts, parameter_counts
from shared.trainer.planner import memory as planned_memory
from shared.trainer.planner.hardware import parse_hardware
from shared.trainer.planner.memory import copies_weights, run_memory, with_gathering
from shared.trainer.planner.plan import plan_run
from shared.trainer.planner.search import fitting as fitting_configs

CONFIG = config_of("fsdp2", mode="grpo", start_from=Path("base"))


def asking(gather: str):
    return replace(CONFIG, grpo=replace(CONFIG.grpo, gather=gather))


def test_both_ways_by_hand():
    """Blocks in bfloat16, the ends in float32; block by block a block, and the one that is fetched ahead."""
    whole, block = sum(parameter_counts(SMALL).values()), sum(block_counts(SMALL, 0).values())
    ends = whole - 3 * block
    [once], [few] = run_memory(asking("once")), run_memory(asking("block"))
    assert once.drawn_with == 4 * ends + 2 * 3 * block
    assert few.drawn_with == 4 * ends + 2 * (1 + CONFIG.parallel.prefetch) * block
    assert once.cache == few.cache > 0 and once.drawing - few.drawing == once.drawn_with - few.drawn_with
    assert run_memory(CONFIG) == [once]
    assert not copies_weights(CONFIG, math.inf)


def test_a_run_whose_whole_weights_do_not_fit_is_planned_block_by_block(monkeypatch):
    one_row = replace(CONFIG, data=replace(CONFIG.data, micro_batch_size=1), grpo=replace(CONFIG.grpo, rows=1))
    [once] = run_memory(replace(one_row, grpo=replace(one_row.grpo, gather="once")))
    held = once.weights + once.optimizer + once.beside
    tight = held + once.cache + once.drawn_with - 1
    assert with_gathering(one_row, tight).grpo.gather == "block" and with_gathering(one_row, 100 * tight).grpo.gather == "once"
    [few] = run_memory(with_gathering(one_row, tight))
    assert few.drawing < tight < once.drawing
    hardware = parse_hardware("2x3090")
    small = replace(hardware, device=replace(hardware.device, memory=tight + 1.5e9))
    plans = [plan_run(one_row, each) for each in (small, hardware)]
    assert [any("block by block" in note for note in plan.notes) for plan in plans] == [True, False]
    assert plans[0].held.drawn_with < plans[1].held.drawn_with
    deciding = max(few.training, few.drawing)
    monkeypatch.setattr(planned_memory, "memory_of", lambda device: int(deciding) + 1)
    planned_memory.require_memory(replace(one_row, precision="bfloat16"), torch.device("cpu"))


def test_what_is_asked_for_is_not_chosen():
    for asked in ("once", "block"):
        assert with_gathering(asking(asked), 1.0) == asking(asked)
    alone = replace(CONFIG, parallel=replace(CONFIG.parallel, fully_sharded=1))
    assert with_gathering(alone, 1.0) == alone


def test_copies_of_a_plain_model_by_hand():
    """All matrices in the dtype of products: of the blocks, and the head, also where it is tied. Not of four bits, nor of sharded ones."""
    alone = replace(CONFIG, parallel=replace(CONFIG.parallel, fully_sharded=1))
    [copied] = run_memory(alone)
    norms = 2 * SMALL.hidden_size
    matrices = 3 * (sum(block_counts(SMALL, 0).values()) - norms) + SMALL.vocab_size * SMALL.hidden_size
    assert copied.drawn_with == {"bfloat16": 2, "float32": 4}[CONFIG.precision] * matrices
    for adapter, there in ((AdapterConfig(), True), (AdapterConfig(base="nf4"), False)):
        [of_adapter] = run_memory(replace(alone, adapter=adapter))
        assert of_adapter.drawn_with == there * copied.drawn_with
    assert run_memory(replace(alone, mode="pretrain"))[0].drawn_with == 0


def test_weights_are_copied_only_where_they_have_room():
    alone = replace(CONFIG, parallel=replace(CONFIG.parallel, fully_sharded=1))
    [copied] = run_memory(alone)
    for usable, there in ((copied.drawing / 0.89, True), (copied.drawing / 0.91, False)):
        assert copies_weights(alone, usable) == there
        [found] = run_memory(alone, usable=usable)
        assert found.drawing == copied.drawing - (not there) * copied.drawn_with


def test_a_run_whose_copies_have_no_room_is_planned_and_let_through_without_them(monkeypatch):
    """With many rows of long answers, and one row in a micro-batch, drawing decides over memory."""
    one = replace(CONFIG.parallel, fully_sharded=1)
    alone = replace(CONFIG, parallel=one, data=replace(CONFIG.data, micro_batch_size=1), grpo=replace(CONFIG.grpo, rows=256))
    [copied] = run_memory(alone)
    [without] = run_memory(alone, usable=copied.drawing)
    assert without.peak < copied.drawing == copied.peak
    tight = (without.peak + copied.peak) / 2
    hardware = parse_hardware("3090")
    small = replace(hardware, device=replace(hardware.device, memory=tight + 1.5e9))
    plans = [plan_run(alone, each) for each in (small, hardware)]
    assert [plan.held.drawn_with for plan in plans] == [0, copied.drawn_with] and all(plan.fits for plan in plans)
    assert [each.parallel.activation_checkpointing for each in fitting_configs([alone], 1, tight, {}, None)] == ["none"]
    monkeypatch.setattr(planned_memory, "memory_of", lambda device: int(tight))
    planned_memory.require_memory(alone, torch.device("cpu"))
