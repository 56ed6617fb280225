"""What the checks of chapter 08 say of answers that no mutant is, and that every wrong answer ends."""

import time
from functools import cache

import pytest
import torch
from children import in_child

from shared.course import binding, catalogue, mutants, running
from shared.course.checking import observe
from shared.course.judging import run_check
from shared.course.report import FAIL, Outcome

EXERCISES = [exercise_id for exercise_id in catalogue.all_exercises() if exercise_id.startswith("08.")]
SETTING_ERROR = "Refuse with SettingError, before the "


def ends_everywhere(exercise_id: str, only: str = "") -> float:
    """Each mutant on each case, also on those behind the one that rejects it: diagnosing an answer asks for them. The longest time."""
    torch.set_num_threads(1)
    binding.choose("reference")
    check, times = running.read_check(catalogue.find_exercise(exercise_id)), [0.0]
    for mutant in mutants.mutants_of(exercise_id):
        if only not in mutant.name:
            continue
        answer, began = mutant.function(), time.process_time()
        for case in check.cases:
            observe(check, case, answer)
        times.append(time.process_time() - began)
    return max(times)


def test_a_simulation_ends_also_where_its_ranks_wait_for_each_other():
    assert in_child(ends_everywhere, "08.simulate", "stages_in_a_row", seconds=60) < 10


@pytest.mark.slow
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_every_mutant_ends_on_every_case(exercise_id):
    assert in_child(ends_everywhere, exercise_id, seconds=200) < 10


def by_recursion(schedule, chunks, seconds, transfer=0.0):
    """Each action asks for the end of the one before it, and of the one that makes its input; ends are remembered."""
    ranks = len(schedule)
    places = {
        (rank, "F" if action.kind == "F" else "B", action.microbatch, action.chunk): place
        for rank, actions in enumerate(schedule)
        for place, action in enumerate(actions)
        if action.kind != "W"
    }

    @cache
    def span(rank, place):
        action = schedule[rank][place]
        stage, begin = action.chunk * ranks + rank, span(rank, place - 1)[1] if place else 0.0
        source = stage - 1 if action.kind == "F" else stage + 1
        if action.kind != "W" and 0 <= source < ranks * chunks:
            other = source % ranks
            needed = places[other, "F" if action.kind == "F" else "B", action.microbatch, source // ranks]
            begin = max(begin, span(other, needed)[1] + transfer * (ranks > 1))
        return begin, begin + seconds(action, stage)

    return [[span(rank, place) for place in range(len(actions))] for rank, actions in enumerate(schedule)]


def refuses_with_value_error(blocks, stages, first=0, last=0):
    """The contract asks for another exception."""
    if len(blocks) < stages:
        raise ValueError("There are fewer blocks than stages")
    return not_refused()(blocks, stages, first, last)


def breaks_in_its_search(blocks, stages, first=0, last=0):
    """Its table has no entry."""
    if len(blocks) < stages:
        raise KeyError((0, stages))
    return not_refused()(blocks, stages, first, last)


def not_refused():
    """The solution without its refusal."""
    [mutant] = [mutant for mutant in mutants.mutants_of("08.balance_stages") if mutant.name == "not_refused"]
    return mutant.function()


ANSWERS = {answer.__name__: answer for answer in (by_recursion, refuses_with_value_error, breaks_in_its_search)}


def judged(exercise_id: str, name: str) -> Outcome:
    torch.set_num_threads(1)
    binding.choose("reference")
    return run_check(running.read_check(catalogue.find_exercise(exercise_id)), ANSWERS[name], mutants.sentences(exercise_id))


def test_a_recursion_as_deep_as_a_list_is_long_is_told_to_use_a_loop():
    outcome = in_child(judged, "08.simulate", "by_recursion", seconds=100)
    assert outcome.state == FAIL and "too many for a call inside a call" in outcome.title
    assert any("Use a loop." in line for line in outcome.problem)


@pytest.mark.parametrize("name", ["refuses_with_value_error", "breaks_in_its_search"])
def test_whatever_breaks_in_place_of_a_refusal_is_told_to_refuse(name):
    outcome = in_child(judged, "08.balance_stages", name, seconds=100)
    assert outcome.state == FAIL and outcome.title == "two blocks for three stages"
    assert outcome.misconception.startswith(SETTING_ERROR)
