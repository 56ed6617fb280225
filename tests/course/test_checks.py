"""The checks themselves: right answers pass, every known wrong one fails with its reason, and nothing passes by doing nothing."""

import pytest
import torch
from answer_perturbation import spoilt_answers
from children import in_child
from known_answers import try_known_answers
from test_judging import constant_case
from workspace import Learner

from shared.course import catalogue, mutants, running
from shared.course.checking import RUNGS, Check
from shared.course.counting import Used
from shared.course.judging import run_check
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, outcome_text
from shared.course.stubs import BodyFile

EXERCISES = catalogue.all_exercises()
by_exercise = pytest.mark.parametrize("exercise_id", EXERCISES)


@pytest.fixture(scope="session")
def known_answers():
    """`try_known_answers`, once for each exercise."""
    found = {}

    def of(exercise_id: str) -> dict:
        if exercise_id not in found:
            found[exercise_id] = in_child(try_known_answers, exercise_id, seconds=600)
        return found[exercise_id]

    return of


@by_exercise
def test_the_solution_passes_every_case_that_is_declared(exercise_id, known_answers):
    outcome, rungs = known_answers(exercise_id)["solution"], known_answers(exercise_id)["rungs"]
    assert outcome.state == PASS, outcome_text(outcome)
    assert outcome.cases == outcome.of == len(rungs) > 0


@by_exercise
def test_right_answers_that_are_not_the_solution_pass(exercise_id, known_answers):
    outcomes = known_answers(exercise_id)["right"]
    assert len(outcomes) >= 2
    assert [outcome_text(outcome) for outcome in outcomes.values() if outcome.state != PASS] == []


@by_exercise
def test_the_cases_climb(exercise_id, known_answers):
    heights = [RUNGS.index(rung) for rung in known_answers(exercise_id)["rungs"]]
    assert heights == sorted(heights)
    assert len(set(heights)) >= 3


@by_exercise
def test_each_mutant_is_rejected_with_its_own_sentence(exercise_id, known_answers):
    """A sentence is given only where no mutant of another sentence does what the answer does, so this also shows that no two are alike."""
    listed = mutants.mutants_of(exercise_id)
    outcomes = known_answers(exercise_id)["wrong"]
    said = {mutant.name: outcomes[f"mutant {mutant.name}"].misconception for mutant in listed}
    assert said == {mutant.name: mutant.sentence for mutant in listed}
    assert all(outcomes[f"mutant {mutant.name}"].state == FAIL for mutant in listed)
    assert len({mutant.sentence for mutant in listed}) == sum(not mutant.like for mutant in listed) >= 5
    assert all(mutant.sentence for mutant in listed)


@by_exercise
def test_each_spoilt_answer_is_rejected(exercise_id, known_answers):
    outcomes = {name: outcome for name, outcome in known_answers(exercise_id)["wrong"].items() if name.startswith("spoilt")}
    assert len(outcomes) >= 4
    assert [name for name, outcome in outcomes.items() if outcome.state != FAIL] == []


@by_exercise
def test_no_case_is_idle(exercise_id, known_answers):
    """A case that accepts every wrong answer that we know would accept anything."""
    assert known_answers(exercise_id)["idle"] == []


def test_every_listed_mutant_belongs_to_an_exercise():
    listed = {entry.exercise for chapter in catalogue.chapters().values() for entry in mutants.mutants_in(chapter.number)}
    assert listed == set(EXERCISES)


# The route that `course check` takes: a child process for each answer.


@pytest.mark.check
@by_exercise
def test_a_written_answer_passes_and_an_untouched_stub_is_not_attempted(exercise_id, tmp_path):
    learner, exercise = Learner(tmp_path, exercise_id[:2]), EXERCISES[exercise_id]
    assert judge(learner, exercise_id).state == NOT_ATTEMPTED
    learner.write(exercise.name)
    assert judge(learner, exercise_id).state == PASS


def judge(learner: Learner, exercise_id: str):
    (outcome,) = running.check_files([EXERCISES[exercise_id]], learner.folder)
    return outcome


TOTAL = "total = logits.sum().to(torch.promote_types(logits.dtype, torch.float32))"  # of the right shape and dtype
HOSTILE = {
    "returns nothing": ("pass", "came out  None"),
    "returns one of two results": ("return logits.sum()", "expected  2 results: loss_sum, token_count"),
    "returns NaN": (f"{TOTAL}\nreturn total * float('nan'), (targets != -100).sum()", "came out  loss_sum = nan"),
    "returns a number for a tensor": ("return 1.3862944, (targets != -100).sum()", "expected  loss_sum = float32, a scalar"),
    "returns the wrong dtype": ("return logits.sum().double(), (targets != -100).sum()", "came out  loss_sum = float64, a scalar"),
    "returns the wrong shape": ("return logits.sum(-1), (targets != -100).sum()", "came out  loss_sum = float32 [1]"),
    "returns a constant": (f"{TOTAL}\nreturn total * 0, torch.tensor(1)", "came out  loss_sum = 0"),
    "modifies its input": (
        f"{TOTAL}\nlogits -= 1\nreturn total, (targets != -100).sum()",
        "it changed its argument logits: it is now [[-1, 0, 1]]  (float32 [1, 3]), was [[0, 1, 2]]  (float32 [1, 3])",
    ),
    "raises": ("raise KeyError('logit')", "exercises.py, line {line}: raise KeyError('logit')"),
    "calls itself through the core": (
        "import shared.loss\nreturn shared.loss.cross_entropy(logits, targets)", "Does your function call itself?",
    ),
    "returns a list that holds itself": ("totals = []\ntotals.append(totals)\nreturn totals", "raised    RecursionError"),
    "calls torch's own": (
        "import torch.nn.functional as F\nreturn F.cross_entropy(logits, targets, reduction='sum'), (targets != -100).sum()",
        "called torch's own cross_entropy, which is what this exercise is to write",
    ),
    "imports the solution": ("import solutions\nreturn 0", "this reads the solution"),
    "imports the solution by name": (
        "import importlib\nreturn importlib.import_module('solutions.01_training_loop')", "this reads the solution",
    ),
    "reads the solution's file": ("return open('solutions/01_training_loop.py').read()", "this reads the solution"),
    "exits as if all were well": ("import sys\nsys.exit(0)", "ended the process (exit code 0) before the check was through"),
    "ends the process at once": ("import os\nos._exit(0)", "ended the process (exit code 0) before the check was through"),
    "prints megabytes": ("print('x' * 20_000_000)\nraise ValueError", "bytes printed in all"),
}


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_wrong_answer_is_explained(answer, tmp_path):
    body, told = HOSTILE[answer]
    learner = Learner(tmp_path)
    learner.write("cross_entropy", body)
    outcome = judge(learner, "01.cross_entropy")
    assert outcome.state == FAIL
    line = next((number for number, text in enumerate(learner.text.split("\n"), 1) if "KeyError" in text), 0)
    assert told.format(line=line) in "\n".join([*outcome.problem, outcome.printed])


def test_an_endless_loop_is_ended_and_shown(tmp_path):
    learner = Learner(tmp_path)
    learner.write("cross_entropy", "while True:\n    targets = targets + 1")
    outcome = running.run_apart(EXERCISES["01.cross_entropy"], BodyFile.read(learner.path), seconds=1.0)
    assert outcome.state == FAIL
    assert "did not finish within 1 s" in outcome.problem[0] and "It was at line" in outcome.problem[0]


def test_an_answer_that_waits_for_ever_is_ended_too(tmp_path):
    """It takes none of the processor's time, so the clock ends it."""
    learner = Learner(tmp_path)
    learner.write("cross_entropy", "import threading\nthreading.Event().wait()")
    outcome = running.run_apart(EXERCISES["01.cross_entropy"], BodyFile.read(learner.path), seconds=1.0, waiting=1.0)
    assert outcome.state == FAIL and "did not finish within 1 s" in outcome.problem[0]


def test_an_answer_that_hangs_while_it_is_diagnosed_keeps_its_report(tmp_path):
    """It fails early, and would wait for ever on a later case, on which it is compared with the mistake that it looks like."""
    learner = Learner(tmp_path)
    learner.write("cross_entropy")
    hangs = "    import threading\n    targets.numel() > 10 and threading.Event().wait()\n    counted = "
    edited = learner.text.replace("    counted = ", hangs).replace(".sum(), counted.sum()", ".sum() / counted.sum(), counted.sum()")
    learner.path.write_text(edited)
    outcome = judge(learner, "01.cross_entropy")
    assert outcome.state == FAIL and "came out" in "\n".join(outcome.problem) and outcome.misconception == ""


def test_a_slow_machine_fails_no_answer(tmp_path):
    """Here the machine gives the answer no time for twice as long as it may compute."""
    learner = Learner(tmp_path)
    learner.write("cross_entropy")
    stopped = learner.text.replace("    counted = ", "    import time\n    time.sleep(0.25)\n    counted = ")
    assert stopped != learner.text
    learner.path.write_text(stopped)
    outcome = running.run_apart(EXERCISES["01.cross_entropy"], BodyFile.read(learner.path), seconds=1.0)
    assert outcome.state == PASS and outcome.seconds > 2


# Checks that are no checks.


def test_a_check_without_cases_is_an_error():
    with pytest.raises(ValueError, match="a check that cannot fail is a defect"):
        run_check(Check("01.cross_entropy", ("y",), [], ("y",)), lambda x: x, {})


def test_a_spoilt_answer_that_a_check_misses_is_noticed():
    """The negative control of the spoilt answers' test: a check of the shape alone lets them pass."""
    check = Check("01.cross_entropy", ("y",), [constant_case(rung="shape and dtype")], ("y",))
    answers = spoilt_answers(check, lambda x: x + 1)
    failed = {name for name, answer in answers.items() if run_check(check, answer, {}).state == FAIL}
    of_another_form = ("in another dtype", "with a dimension too many", "last element dropped", "last element doubled")
    assert failed == {f"y: {how}" for how in of_another_form}
    assert len(answers) == 11


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_is_counted_by_its_places_and_numbers(layout):
    """It has no storage of its own: an answer that used one broke where its memory was counted."""
    matrix = torch.eye(64)
    with Used() as used:
        kept = matrix.to_sparse(layout=layout)
        again = kept * 2
    places_and_numbers = 64 * (2 * 8 + 4)  # two places in int64 and a number in float32 for each
    assert places_and_numbers <= used.peak < matrix.nbytes / 4
    assert torch.equal(again.to_dense(), 2 * matrix)
