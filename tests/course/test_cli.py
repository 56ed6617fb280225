"""The `course` command as a learner meets it, in a folder of the learner's own."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time

import psutil
import pytest
from workspace import COMMAND, Learner

from shared.course import catalogue, check_command, released, report, running
from shared.course.cli import cli
from shared.course.mutants import mutants_of
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, Outcome

FIRST = "01.cross_entropy"
LEARNERS = ["next", "check", "hunt", "watch", "hint", "solution", "reset", "status", "map", "read", "doctor"]


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_a_command_answers_without_loading_torch():
    modules = ["cli", "check_command", "watch", "doctor", "report", "reading"]
    script = f"import sys\nfor m in {modules}: __import__('shared.course.' + m)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=180).returncode == 0


def test_every_command_of_the_learner_is_there_and_shows_examples(learner):
    told = learner.course("--help")
    assert told.exit_code == 0
    assert [name for name, command in cli.commands.items() if command.section == "learners"] == LEARNERS
    for name in cli.commands:
        assert name in told.stdout
        help_text = learner.course(name, "--help").stdout
        assert f"Examples:\n    course {name}" in help_text


def test_the_command_alone_says_what_to_do(learner):
    told = learner.course().stdout
    assert told.startswith(f"0 of {len(catalogue.all_exercises())} exercises are yours")
    assert f"Next: {FIRST}" in told and f"course check {FIRST}" in told and "course --help" in told


@pytest.mark.parametrize(
    ("arguments", "offered"),
    [
        (["chek"], "Did you mean `course check`?"),
        (["samples", "runs/a"], "Did you mean `course sample`?"),
        ([FIRST], f"Did you mean `course check {FIRST}`?"),
        (["check", "01.cros_entropy"], f"Did you mean {FIRST}?"),
        (["hint", "cross_entropy"], f"Did you mean {FIRST}?"),
        (["check", "77"], "There is no chapter '77'. Chapters so far: 01"),
        (["read", "shared.los"], "Did you mean shared.loss?"),
        (["check", "--imp", "mine"], "--impl"),
        (["hint"], "Missing argument"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(learner, arguments, offered):
    refused = learner.course(*arguments)
    assert refused.exit_code == 64 and offered in refused.stderr and "Traceback" not in refused.output


@pytest.mark.parametrize(("name", "meant"), [("compare", "report"), ("list", "runs"), ("generate", "sample")])
def test_a_name_that_other_programs_have_for_a_command_is_taken(learner, name, meant):
    assert learner.course(name, "--help").stdout.splitlines()[1:] == learner.course(meant, "--help").stdout.splitlines()[1:]
    assert "Usage:" in learner.course(name, "--help").stdout


def test_untouched_stubs_are_not_attempted(learner):
    checked = learner.course("check", "01")
    assert checked.exit_code == 2
    every = len(learner.chapter.exercises)
    assert checked.stdout.count("  NOT ATTEMPTED") == every
    assert checked.stdout.rstrip().endswith(f"{every} exercises checked: 0 passed, 0 failed, {every} not attempted.")
    assert learner.progress.read() == {}


def test_the_solutions_pass_and_leave_no_trace(learner):
    checked = learner.course("check", "--impl", "reference")
    assert checked.exit_code == 0, checked.output
    total = len(catalogue.all_exercises())
    assert f"{total} exercises checked: {total} passed, 0 failed, 0 not attempted." in checked.stdout
    assert not learner.progress.folder.exists()


def test_course_check_reports_a_wrong_answer_as_a_notebook_does(learner):
    mutant = mutants_of(FIRST)[0]
    body = mutant.body_file().text("cross_entropy")
    learner.path.write_text(learner.text.replace(learner.function("cross_entropy"), body), encoding="utf-8")
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 1
    [outcome] = running.check_files([catalogue.find_exercise(FIRST)], learner.folder)
    assert checked.stdout.removesuffix("\n").endswith(report.outcome_text(outcome))
    told = " ".join(checked.stdout.split())
    headline = f"{FIRST} FAIL case {outcome.cases} of {outcome.of}, {outcome.rung}"
    for expected in (headline, outcome.title, mutant.sentence, f"course hint {FIRST}"):
        assert expected in told
    assert learner.progress.read()[FIRST] == {"passed": None, "solved": False}


def test_after_a_pass_come_the_solution_the_question_and_the_next_exercise(learner):
    learner.write("cross_entropy", "exact = logits if logits.dtype == torch.float64 else logits.float()\n" + ANOTHER_WAY)
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 0, checked.output
    told = " ".join(checked.stdout.split())
    yours, course = told.split("the course's:")
    assert "exact.log_softmax(-1)" in yours and "The summed cross-entropy" not in yours and "losses.where(counted, 0)" in course
    assert catalogue.find_exercise(FIRST).after in told and told.endswith("Next: 01.accumulate_gradients (Gradient accumulation, 10 min).")
    assert FIRST in learner.course("check", "01").stdout and "the course's:" not in learner.course("check", "01").stdout


ANOTHER_WAY = """
counted = targets != -100
chances = exact.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
return -chances.where(counted, 0).sum(), counted.sum()
"""


def test_a_fail_outweighs_what_is_not_attempted():
    outcome = {state: Outcome(FIRST, state) for state in (PASS, FAIL, NOT_ATTEMPTED)}
    assert check_command.exit_code([outcome[PASS]]) == 0
    assert check_command.exit_code([outcome[PASS], outcome[NOT_ATTEMPTED]]) == 2
    assert check_command.exit_code([outcome[NOT_ATTEMPTED], outcome[FAIL], outcome[PASS]]) == 1


def test_nothing_to_check_is_an_error(learner, monkeypatch):
    monkeypatch.setattr(catalogue, "select", lambda names: [])
    refused = learner.course("check")
    assert refused.exit_code == 64 and "nothing to check" in refused.stderr


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return None", "None"),
        ("return logits.sum().half(), targets.sum()", "float16"),
        ("logits += 1\nreturn logits.sum(), targets.sum()", "argument logits"),
        ("from solutions import anything", "this reads the solution"),
        ("import sys\nsys.exit(0)", "Your code ended the process (exit code 0)"),
    ],
    ids=["none", "dtype", "changed input", "solution", "exit"],
)
def test_a_body_that_cannot_be_right_is_explained(learner, body, sentence):
    learner.write("cross_entropy", body)
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 1 and sentence in " ".join(checked.stdout.split()) and "Traceback" not in checked.output


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda text: text.replace("def cross_entropy(", "def cross_entropy(("), "Python cannot read this file"),
        (lambda text: text.replace("def cross_entropy(", "@torch.no_grad()\ndef cross_entropy("), "without a decorator"),
        (lambda text: text.replace("def cross_entropy(logits", "def cross_entropy(scores"), "here: cross_entropy(scores, targets)"),
        (lambda text: f"{text}\n1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
    ids=["syntax", "decorator", "signature", "top level"],
)
def test_a_file_that_cannot_be_right_is_explained(learner, spoil, sentence):
    learner.write("cross_entropy")
    learner.path.write_text(spoil(learner.text), encoding="utf-8")
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 1 and sentence in " ".join(checked.stdout.split()) and "Traceback" not in checked.output
    if "cannot read" in sentence or "signature" in checked.stdout:
        assert f"line {learner.line('def cross_entropy')}" in checked.stdout


def test_a_function_that_is_gone_is_not_attempted_and_can_be_brought_back(learner):
    learner.path.write_text(learner.text.replace("def cross_entropy(", "def cross_entrophy("), encoding="utf-8")
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 2 and f"has no function cross_entropy. `course reset {FIRST}`" in " ".join(checked.stdout.split())


def test_a_file_that_is_no_text_or_is_gone_is_explained(learner):
    learner.path.write_bytes(b"x = '\xff'\n")
    assert "is not UTF-8 text (byte 5)" in learner.course("check", FIRST).stdout
    learner.course("hint", FIRST)
    learner.path.unlink()
    missing = learner.course("check", FIRST)
    assert missing.exit_code == 1 and "is missing. `course reset 01` makes a new one" in missing.stdout


def test_what_an_answer_prints_is_shown_harmless(learner):
    learner.write("cross_entropy", r'print("\x1b[2Jhello"); print("many\n" * 200)' + "\nreturn None")
    shown = learner.course("check", FIRST).stdout
    assert r"\x1b[2Jhello" in shown and "\x1b" not in shown and shown.count("many") < 20


def test_unwritable_progress_is_reported_in_one_line(learner):
    learner.write("cross_entropy")
    learner.progress.folder.symlink_to(learner.folder / "nowhere")  # cannot be written, whoever runs the tests
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 0 and "Progress cannot be kept" in checked.stdout
    refused = learner.course("reset", FIRST)
    assert refused.exit_code == 64 and "Nothing was reset" in refused.stderr


def test_a_damaged_record_is_refused_before_anything_runs(learner):
    learner.progress.folder.mkdir()
    for damaged in ("{", "[1]", '{"01.cross_entropy": 3}'):
        learner.progress.path.write_text(damaged)
        refused = learner.course("check")
        assert refused.exit_code == 64 and "Delete it" in refused.stderr and not refused.stdout


def test_an_edited_core_is_reported_in_one_line(learner, monkeypatch):
    files = released.guarded_files() | {"shared/loop.py": "another", "shared/gone.py": "missing"}
    monkeypatch.setattr(released, "recorded", lambda: {"files": files, "stubs": {}})
    assert learner.course("check", FIRST).stdout.splitlines()[0] == "Not as released: shared/gone.py and 1 other file (`course doctor`)."


def test_the_released_record_is_of_this_core():
    assert released.recorded() == released.current(), "run `course release`"


def test_two_checks_at_once_lose_nothing(learner):
    learner.write("cross_entropy")
    running_now = [learner.start("check", FIRST), learner.start("check", FIRST)]
    running_now += [learner.start("hint", exercise.id) for exercise in learner.chapter.exercises]
    assert [process.wait(300) for process in running_now] == [0] * len(running_now)
    record = learner.progress.read()
    assert all(record[exercise.id]["hints"] == 1 for exercise in learner.chapter.exercises) and record[FIRST]["passed"]


def test_a_check_that_fails_itself_is_not_held_against_the_answer(tmp_path, monkeypatch):
    def broken(exercise_id, file, seconds, waiting, keep):
        raise ZeroDivisionError("in the oracle")

    monkeypatch.setattr(running, "check_in_this_process", broken)
    (tmp_path / "output.txt").touch()
    child = multiprocessing.get_context("fork").Process(target=running.child_main, args=(FIRST, None, str(tmp_path), 20.0))
    child.start()
    child.join(180)
    outcome = Outcome(**json.loads((tmp_path / "result.json").read_text()))
    assert outcome.state == FAIL and "a fault of the course" in outcome.problem[0] and "in the oracle" in outcome.problem[0]
    assert "in broken" in (tmp_path / "output.txt").read_text()


def test_a_missing_check_is_reported(learner, monkeypatch):
    monkeypatch.setattr(running, "CHECKOUT", learner.folder)
    learner.write("cross_entropy")
    refused = learner.course("check", FIRST)
    assert refused.exit_code == 64 and "cannot be checked. `git checkout tests/exercises/checks`" in refused.stderr


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGKILL"])
def test_an_interrupted_check_leaves_no_process_behind(learner, signal_name):
    learner.write("cross_entropy", "import os, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\nos.read(os.pipe()[0], 1)")
    process = learner.start("check", FIRST)
    marker = learner.folder / "pid"
    wait_for(lambda: marker.exists() and marker.read_text())
    process.send_signal(getattr(signal, signal_name))
    output, _ = process.communicate(timeout=180)
    if signal_name == "SIGINT":
        assert process.returncode == 130 and "Stopped." in output and "Traceback" not in output
    wait_for(lambda: has_ended(int(marker.read_text())))


def has_ended(number: int) -> bool:
    """Also of one whose parent ended first, where nothing on the machine takes note of it: containers may lack an init process."""
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_the_learners_folder_is_found_from_below(learner):
    below = learner.folder / "notes" / "deep"
    below.mkdir(parents=True)
    told = subprocess.run([*COMMAND, "next"], cwd=below, capture_output=True, text=True, timeout=180)
    line = learner.line("def cross_entropy")
    assert told.returncode == 0 and f"write    chapters/{learner.chapter.slug}/exercises.py, line {line}" in told.stdout
