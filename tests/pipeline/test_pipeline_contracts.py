"""The sentences of chapter 08's contracts, one by one, on pipelines and costs that hypothesis makes up."""

import re
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.course.errors import SettingError
from shared.parallel.pipeline import schedules
from shared.parallel.pipeline.axis import balance_stages
from shared.parallel.pipeline.schedules import Action, interleaved, make_schedule
from shared.parallel.pipeline.simulate import Times, make_timeline, simulate

SLOTS = Times(forward=1.0, input=0.5, weight=0.5)  # every pass takes one
NAMES = st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"])
COUNTS = st.integers(1, 6)
often = settings(max_examples=80)


def of_kind(actions: list[Action], kind: str) -> list[tuple[int, int]]:
    return [(action.microbatch, action.chunk) for action in actions if action.kind == kind]


@often
@given(ranks=COUNTS, microbatches=st.integers(1, 12))
def test_1f1b_takes_gpipes_time_keeps_as_many_as_stages_follow_and_goes_forward_as_early_as_it_can(ranks, microbatches):
    schedule = make_schedule("1f1b", ranks, microbatches)
    timeline = make_timeline(schedule, microbatches, times=SLOTS)
    assert timeline.seconds == make_timeline(make_schedule("gpipe", ranks, microbatches), microbatches, times=SLOTS).seconds
    for rank, actions in enumerate(schedule):
        assert of_kind(actions, "F") == of_kind(actions, "B") == [(number, 0) for number in range(microbatches)]
        assert timeline.most[rank] <= ranks - rank
        kept, forward = 0, 0
        for action in actions:
            if action.kind == "B" and forward < microbatches:
                assert kept == ranks - rank  # otherwise the next forward pass could have come first
            kept += 1 if action.kind == "F" else -1
            forward += action.kind == "F"


@often
@given(ranks=COUNTS, groups=st.integers(1, 3), chunks=st.integers(1, 4))
def test_interleaved_goes_in_groups_takes_turns_and_fills_every_slot_before_its_first_backward_pass(ranks, groups, chunks):
    microbatches = ranks * groups
    schedule = make_schedule("interleaved", ranks, microbatches, chunks)
    rows = make_timeline(schedule, microbatches, chunks, SLOTS).rows
    first_backward = [next(place for place, action in enumerate(actions) if action.kind == "B") for actions in schedule]
    assert schedule[-1][first_backward[-1] - 1] == Action("F", 0, chunks - 1)
    for rank, actions in enumerate(schedule):
        order = [(group * ranks + own, chunk) for group in range(groups) for chunk in range(chunks) for own in range(ranks)]
        assert of_kind(actions, "F") == order
        assert of_kind(actions, "B") == [(microbatch, chunks - 1 - chunk) for microbatch, chunk in order]
        opening = first_backward[rank] - 1  # the forward pass with which the turns begin
        left = sum(action.kind == "F" for action in actions[opening:])
        kinds = "".join(action.kind for action in actions)
        assert kinds == "F" * opening + "FB" * left + "B" * (len(order) - left)
        begins = rows[rank][first_backward[rank]].begin
        assert rank == ranks - 1 or begins == rows[rank + 1][first_backward[rank + 1]].begin + 1
        assert begins == rank + first_backward[rank] or first_backward[rank] == len(order)


@often
@given(ranks=COUNTS, microbatches=st.integers(1, 12), chunks=st.integers(1, 3))
def test_interleaved_refuses_a_group_that_is_not_full(ranks, microbatches, chunks):
    if microbatches % ranks == 0:
        assert len(interleaved(0, ranks, microbatches, chunks)) == 2 * microbatches * chunks
        return
    with pytest.raises(SettingError, match=f"groups of {ranks}.* a step has {microbatches}"):
        interleaved(0, ranks, microbatches, chunks)


@pytest.mark.parametrize("name, ranks, microbatches, chunks", [("1f1b", 3, 5, 1), ("interleaved", 2, 4, 2)])
def test_the_drawings_of_the_contracts_are_what_is_simulated(name, ranks, microbatches, chunks):
    function = {"1f1b": schedules.one_forward_one_backward, "interleaved": schedules.interleaved}[name]
    drawn = re.findall(r"^ +rank \d +(\S.*)$", function.__doc__, re.M)
    timeline = make_timeline(make_schedule(name, ranks, microbatches, chunks), microbatches, chunks, SLOTS)
    for row, line in zip(timeline.rows, drawn, strict=True):
        slots = ["..."] * round(timeline.seconds)
        for action, begin, _ in row:
            slots[round(begin)] = f"{action.kind}{action.microbatch}" + "'" * action.chunk
        assert line.split() == slots


@often
@given(
    data=st.data(), name=NAMES, ranks=COUNTS, groups=st.integers(1, 3), chunks=st.integers(1, 3),
    transfer=st.sampled_from([0.0, 0.25, 3.0]),
)  # fmt: skip
def test_every_action_begins_as_early_as_its_rank_and_its_input_permit(data, name, ranks, groups, chunks, transfer):
    chunks = chunks if name == "interleaved" else 1
    schedule = make_schedule(name, ranks, ranks * groups, chunks)
    lengths = {(action, rank): data.draw(st.integers(0, 9)) / 4 for rank, own in enumerate(schedule) for action in own}
    rows = simulate(schedule, chunks, lambda action, stage: lengths[action, stage % ranks], transfer)
    ends = {}
    for rank, (own, row) in enumerate(zip(schedule, rows, strict=True)):
        for action, (_, end) in zip(own, row, strict=True):
            ends[action.kind.replace("I", "B"), action.chunk * ranks + rank, action.microbatch] = end
    for rank, (own, row) in enumerate(zip(schedule, rows, strict=True)):
        free = 0.0
        for action, (begin, end) in zip(own, row, strict=True):
            stage = action.chunk * ranks + rank
            source = {"F": stage - 1, "W": -1}.get(action.kind, stage + 1)
            inside = 0 <= source < ranks * chunks
            arrived = ends[action.kind.replace("I", "B"), source, action.microbatch] + transfer * (ranks > 1) if inside else 0.0
            assert begin == max(free, arrived) and end == begin + lengths[action, rank]
            free = end


COSTS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@often
@given(blocks=COSTS, stages=st.integers(1, 6), first=st.integers(0, 12), last=st.integers(0, 12))
def test_the_balanced_split_is_the_best_of_all_by_the_contracts_order(blocks, stages, first, last):
    if len(blocks) < stages:
        with pytest.raises(SettingError, match=f"There are {len(blocks)} blocks for {stages} pipeline stages"):
            balance_stages(blocks, stages, first, last)
        return

    def order(split: list[range]) -> tuple:
        costs = [sum(blocks[number] for number in stage) for stage in split]
        costs[0] += first
        costs[-1] += last
        return sorted(costs, reverse=True), [-len(stage) for stage in split]

    every = [[0, *cuts, len(blocks)] for cuts in combinations(range(1, len(blocks)), stages - 1)]
    splits = [[range(start, stop) for start, stop in pairwise(edges)] for edges in every]
    assert balance_stages(tuple(blocks), stages, first, last) == min(splits, key=order)
    assert sum(order(split) == order(min(splits, key=order)) for split in splits) == 1  # so that every rank finds the same


@often
@given(cost=st.floats(0.001, 1e18), count=st.integers(1, 40), stages=st.integers(1, 8))
def test_equal_blocks_are_shared_out_evenly_and_the_first_stages_have_one_more(cost, count, stages):
    if count < stages:
        return
    evenly = [[*map(int, part)] for part in torch.arange(count).tensor_split(stages)]
    assert [[*stage] for stage in balance_stages([cost] * count, stages)] == evenly
