"""What the command keeps and gives back: hints, solutions, resets, and where a learner stands."""

import json
import os

import pytest
from workspace import Learner

from shared.course import catalogue, status, stubs

FIRST = "01.cross_entropy"
TOTAL = len(catalogue.all_exercises())


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_hints_open_one_by_one_and_the_third_opens_the_solution(learner):
    closed = learner.course("solution", FIRST)
    assert closed.exit_code == 1 and "third hint: 3 hints to go" in " ".join(closed.stdout.split()) and "logsumexp" not in closed.stdout
    skipped = learner.course("hint", FIRST, "--rung", "2")
    assert skipped.exit_code == 64 and "comes after hint 1" in skipped.stderr
    for rung, hint in enumerate(catalogue.find_exercise(FIRST).hints, start=1):
        told = learner.course("hint", FIRST)
        assert f"hint {rung} of 3" in told.stdout and " ".join(hint.split()) in " ".join(told.stdout.split())
    assert learner.course("hint", FIRST, "--rung", "1").stdout.startswith(f"{FIRST}  hint 1 of 3")
    assert learner.progress.hints(FIRST) == 3
    opened = learner.course("solution", FIRST)
    assert opened.exit_code == 0 and stubs.BodyFile.read(learner.chapter.solution_file).text("cross_entropy") in opened.stdout


def test_a_pass_opens_the_solution_for_good(learner):
    learner.progress.record_check(FIRST, "a fingerprint")
    learner.progress.record_check(FIRST, None)
    assert learner.progress.passed(FIRST) is None
    assert learner.course("solution", FIRST).exit_code == 0


def test_reset_touches_one_function_and_keeps_its_text(learner):
    learner.path.write_text(learner.text.replace("# The loss", "HELPER = 1\n\n\n# The loss"), encoding="utf-8")
    fresh = learner.text
    learner.write("evaluate")
    with_another = learner.text
    learner.write("cross_entropy", "return HELPER")
    learner.path.write_text(learner.text.replace("def cross_entropy(", "@torch.no_grad()\ndef cross_entropy("), encoding="utf-8")
    told = learner.course("reset", FIRST)
    assert told.exit_code == 0 and learner.text == with_another != fresh
    [saved] = (learner.progress.folder / "saved").iterdir()
    assert saved.name.endswith("-01.cross_entropy.py") and str(saved.relative_to(learner.folder)) in " ".join(told.stdout.split())
    assert saved.read_text().startswith("@torch.no_grad()\ndef cross_entropy(") and saved.read_text().endswith("return HELPER\n")
    assert "nothing to reset" in learner.course("reset", FIRST).stdout and len(list(saved.parent.iterdir())) == 1


def test_reset_brings_back_a_function_that_was_deleted(learner):
    stub = learner.function("cross_entropy")
    learner.path.write_text(learner.text.replace(stub, ""), encoding="utf-8")
    assert learner.course("reset", FIRST).exit_code == 0
    assert learner.function("cross_entropy") == stub


def test_reset_of_a_chapter_asks_first(learner):
    fresh = learner.text
    learner.path.write_bytes(b"\xff mine")
    assert learner.course("reset", "01", answer="n\n").exit_code == 1 and learner.path.read_bytes() == b"\xff mine"
    assert learner.course("reset", "01", answer="y\n").exit_code == 0 and learner.text == fresh
    [saved] = (learner.progress.folder / "saved").iterdir()
    assert saved.read_bytes() == b"\xff mine"
    learner.path.unlink()
    assert learner.course("reset", "01").exit_code == 0 and learner.text == fresh


def test_status_follows_the_file_and_the_record(learner):
    def states() -> list[str]:
        return [found.state for found in status.exercise_statuses(learner.folder)]

    learner.write("cross_entropy")
    assert states()[:2] == [status.ATTEMPTED, status.UNTOUCHED]
    learner.course("check", FIRST)
    assert states()[0] == status.PASSED
    learner.path.write_text(learner.text.replace("counted = targets != -100", "counted = targets != -100  # masked"), encoding="utf-8")
    learner.write("evaluate")
    assert states()[0] == status.PASSED, "comments and other exercises are not this answer"
    told = learner.course("status").stdout
    assert f"1 of {TOTAL} exercises are yours" in told and "Next: 01.accumulate_gradients" in learner.course("next").stdout
    learner.path.write_text(learner.text.replace("targets != -100", "targets >= 0"), encoding="utf-8")
    assert states()[0] == status.CHANGED and f"0 of {TOTAL}" in learner.course("status").stdout
    learner.path.write_text("def", encoding="utf-8")
    assert set(states()[: len(learner.chapter.exercises)]) == {status.UNREADABLE} and learner.course("next").exit_code == 64


def test_course_next_after_the_last_exercise():
    found = [status.ExerciseStatus(e, status.UNTOUCHED, 0) for e in catalogue.find_chapter("01").exercises]
    assert status.next_open(found) == found[0].exercise
    assert status.next_open(found, after=found[-1].exercise) == found[0].exercise
    assert status.next_open([status.ExerciseStatus(f.exercise, status.PASSED, 0) for f in found]) is None


def test_the_record_is_text_that_a_person_can_read(learner):
    learner.course("hint", FIRST)
    assert json.loads((learner.folder / ".course" / "progress.json").read_text()) == {FIRST: {"hints": 1}}
    assert not os.access(learner.folder / ".course" / "progress.json", os.X_OK)
