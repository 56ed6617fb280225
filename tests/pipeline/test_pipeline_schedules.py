"""Pipeline schedules as data: against PyTorch's own generators, the formulas of the bubble and of kept activations, and faults found."""

import random
import sys

import pytest

from shared.course import catalogue, running
from shared.course.errors import SettingError
from shared.parallel.pipeline.schedules import Action, bubble_fraction, interleaved, make_schedule
from shared.parallel.pipeline.simulate import ScheduleError, Times, draw, make_timeline, validate

running.read_check(catalogue.find_exercise("08.gpipe"))  # loads what the checks of this chapter share
by_torch = sys.modules["course_checks_08.lists"].by_torch

SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 7, 8, 16, 32)]
INTERLEAVED = [(ranks, chunks, ranks * groups) for ranks in (2, 3, 4, 8) for chunks in (1, 2, 3, 4) for groups in (1, 2, 4)]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_gpipe_and_1f1b_are_those_of_pytorch(ranks, microbatches):
    assert make_schedule("gpipe", ranks, microbatches) == by_torch("ScheduleGPipe", ranks, microbatches)
    if microbatches < ranks:  # PyTorch's generator then warms up with micro-batches that there are not
        return
    assert make_schedule("1f1b", ranks, microbatches) == by_torch("Schedule1F1B", ranks, microbatches)


@pytest.mark.parametrize("ranks, chunks, microbatches", INTERLEAVED)
def test_interleaved_1f1b_is_that_of_pytorch(ranks, chunks, microbatches):
    theirs = by_torch("ScheduleInterleaved1F1B", ranks, microbatches, chunks)
    assert make_schedule("interleaved", ranks, microbatches, chunks) == theirs


@pytest.mark.parametrize("ranks, groups", [(ranks, groups) for ranks in (2, 3, 4, 8) for groups in (1, 2, 4)])
def test_zb_h1_is_that_of_pytorch(ranks, groups):
    theirs = by_torch("ScheduleInterleavedZeroBubble", ranks, ranks * groups)
    assert make_schedule("zero_bubble", ranks, ranks * groups) == theirs


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_schedules_with_one_chunk_have_the_bubble_and_the_activations_of_the_formulas(ranks, microbatches):
    times = Times(forward=1.0, input=1.3, weight=0.7)
    for name in ("gpipe", "1f1b"):
        timeline = make_timeline(make_schedule(name, ranks, microbatches), microbatches, times=times)
        for rank in range(ranks):
            assert timeline.bubble(rank) == pytest.approx(bubble_fraction(ranks, microbatches), abs=1e-9)
            assert timeline.most[rank] == (microbatches if name == "gpipe" else min(microbatches, ranks - rank))
    if microbatches >= ranks:
        timeline = make_timeline(make_schedule("zero_bubble", ranks, microbatches), microbatches, times=times)
        expected = (ranks - 1) * (times.forward + times.input - times.weight) / (3.0 * microbatches)
        assert timeline.bubble() == pytest.approx(expected, abs=1e-9)  # Qi et al. 2023, table 1
        assert max(timeline.most) == timeline.most[0] == min(microbatches, ranks)


@pytest.mark.parametrize("ranks, chunks, microbatches", INTERLEAVED)
def test_chunks_divide_the_bubble_and_keep_more_activations(ranks, chunks, microbatches):
    timeline = make_timeline(make_schedule("interleaved", ranks, microbatches, chunks), microbatches, chunks)
    for rank in range(ranks):
        assert timeline.bubble(rank) == pytest.approx(bubble_fraction(ranks, microbatches, chunks), abs=1e-9)
        most = (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert timeline.most[rank] == min(most, chunks * microbatches)


def test_a_slow_stage_and_slow_messages_lengthen_a_step():
    schedule = make_schedule("1f1b", 2, 4)
    assert make_timeline(schedule, 4).seconds == 15
    assert make_timeline(schedule, 4, times=Times(stages=(1.0, 2.0))).seconds == 4 * 2 * 3 + 3  # the second stage never waits again
    assert make_timeline(schedule, 4, times=Times(transfer=1.0)).seconds > 15


def test_a_timeline_is_drawn():
    timeline = make_timeline(make_schedule("1f1b", 2, 2), 2)
    assert draw(timeline, columns=9) == "rank 0  01..aa.bb\nrank 1  .0aa1bb.."


# Faults. Each is made in a right schedule, and named with its place.


def broken(name: str, change, *, ranks: int = 2, microbatches: int = 4, chunks: int = 1, blocking: bool = False) -> str:
    schedule = make_schedule(name, ranks, microbatches, chunks)
    validate(schedule, microbatches, chunks)
    change(schedule)
    with pytest.raises(ScheduleError) as refused:
        validate(schedule, microbatches, chunks, blocking)
    return str(refused.value)


def swap(rank: int, one: int, other: int):
    def change(schedule):
        own = schedule[rank]
        own[one], own[other] = own[other], own[one]

    return change


def put(rank: int, place: int, action: Action):
    return lambda schedule: schedule[rank].__setitem__(place, action)


FAULTS = [
    (("1f1b", lambda s: s[0].pop()), "Rank 0 never does B3: its list of 7 actions lacks it."),
    (("zero_bubble", lambda s: s[1].remove(Action("W", 2))), "Rank 1 never does W2: its list of 11 actions lacks it."),
    (("1f1b", lambda s: s[1].__delitem__(slice(6, 8))), "Rank 1 never does F3: its list of 6 actions lacks it."),
    (("1f1b", lambda s: s[0].insert(3, Action("F", 1))), "Rank 0, action 4 of 9 (F1): F1 is in the list already."),
    (("1f1b", swap(1, 0, 1)), "Rank 1, action 1 of 8 (B0): it comes before F0."),
    (("zero_bubble", swap(0, 2, 3)), "Rank 0, action 3 of 12 (W0): it comes before I0."),
    (("1f1b", put(1, 3, Action("I", 0))), "Rank 1, action 4 of 8 (I0): its backward pass is in the list already"),
    (("1f1b", put(1, 3, Action("F", 4))), "Rank 1, action 4 of 8 (F4): there are 4 micro-batches and 1 chunks, counted from 0."),
    (("1f1b", put(1, 3, Action("X", 1))), "Rank 1, action 4 of 8 (X1): there is no kind 'X': give F, B, I or W."),
    (
        ("gpipe", swap(1, 0, 1)),
        "Rank 1, action 1 of 8 (F1): it needs the activations of micro-batch 1 from stage 0, and what rank 0 sends next on this way are "
        "the activations of micro-batch 0 from stage 0.",
    ),
    (("gpipe", swap(0, 4, 5)), "Rank 0, action 5 of 8 (B1): it needs the gradients of micro-batch 1 from stage 1"),
]


@pytest.mark.parametrize("made, told", FAULTS)
def test_a_broken_schedule_is_refused_with_the_place(made, told):
    assert told in broken(*made)


def test_a_ring_of_ranks_that_wait_is_a_deadlock():
    """Rank 0 wants a gradient before it sends the second micro-batch forward, and rank 1 wants that first."""

    def first_backward_early(schedule):
        schedule[0][:] = [Action(*each) for each in (("F", 0), ("B", 0), ("F", 1), ("B", 1))]
        schedule[1][:] = [Action(*each) for each in (("F", 0), ("F", 1), ("B", 0), ("B", 1))]

    assert broken("1f1b", first_backward_early, microbatches=2) == (
        "Deadlock, with sends that return at once: rank 0 in B0 waits for the gradients of micro-batch 0 from stage 1; "
        "rank 1 in F1 waits for the activations of micro-batch 1 from stage 0."
    )


def test_two_sends_at_once_deadlock_where_sends_wait():
    """Neighbours in the middle of 1F1B send to each other: buffered sends are needed. In GPipe nobody does."""
    told = broken("1f1b", lambda schedule: None, blocking=True)
    assert told == "Deadlock, with sends that wait until they are received: rank 0 in F1 sends to rank 1; rank 1 in B0 sends to rank 0."
    assert validate(make_schedule("gpipe", 4, 8), 8, blocking=True) == [8] * 4


def test_every_accepted_list_ends_and_every_refused_one_is_named():
    """Random lists: two neighbours swapped in one rank's list. Whatever is accepted can be simulated to its end."""
    generator, accepted = random.Random(0), 0
    for _ in range(300):
        name, chunks = generator.choice([("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
        schedule = make_schedule(name, 4, 8, chunks)
        own = generator.choice(schedule)
        place = generator.randrange(len(own) - 1)
        own[place], own[place + 1] = own[place + 1], own[place]
        try:
            timeline = make_timeline(schedule, 8, chunks)
        except ScheduleError as refused:
            assert "Rank" in str(refused) or "Deadlock" in str(refused)
            continue
        accepted += 1
        assert [[span.action for span in row] for row in timeline.rows] == schedule
    assert 50 < accepted < 250


def test_what_has_no_schedule_is_refused():
    with pytest.raises(SettingError, match="groups of 4, as many as there are ranks, and a step has 6: give 4 or 8 micro-batches"):
        interleaved(0, 4, 6, 2)
    with pytest.raises(SettingError, match="The schedule 1f1b gives each rank one chunk of the model, not 2"):
        make_schedule("1f1b", 2, 4, 2)
