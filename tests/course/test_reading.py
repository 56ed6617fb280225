"""Reading the core with `course map` and `course read`: complete, in place, and nothing given away."""

import ast
import subprocess

import pytest
from workspace import COMMAND, Learner

from shared.course import catalogue, reading, stubs

FIRST = "01.cross_entropy"


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_map_lists_every_module_of_the_chapter_and_marks_exercises(learner):
    told = learner.course("map", "1").stdout
    assert all(f"\n{room.module}\n" in told for room in reading.rooms("01")) and "shared.course" not in told
    for exercise in learner.chapter.exercises:
        assert f"\n  * {exercise.name}: " in told
    assert "\n    train: Train for `steps` steps" in told


def test_read_withholds_what_is_not_done(learner):
    closed = learner.course("read", "shared.loss").stdout
    assert "logsumexp(dim=-1)" not in closed and f"`course solution {FIRST}` opens the body" in closed
    opened = learner.course("read", "shared/loss.py", "--reveal").stdout
    assert "# logsumexp subtracts the largest logit" in opened
    learner.write("cross_entropy", "return mine")
    assert "\n    return mine\n" in learner.course("read", "loss", "--impl", "mine").stdout
    learner.progress.record_check(FIRST, "a fingerprint")
    assert learner.course("read", "shared.loss").stdout == opened


@pytest.mark.parametrize("contract", catalogue.contracts().values(), ids=lambda contract: contract.exercise)
def test_a_module_read_in_place_holds_the_solutions_statements(learner, contract):
    shown = ast.parse(learner.course("read", contract.module, "--reveal").stdout)
    [function] = [node for node in shown.body if getattr(node, "name", "") == contract.function]
    solution = stubs.BodyFile.read(catalogue.chapter_of(contract.exercise).solution_file).function(contract.function)
    assert list(map(ast.dump, stubs.without_docstring(function))) == list(map(ast.dump, stubs.without_docstring(solution)))


def test_a_pipe_that_closes_early_is_no_error(learner):
    script = f"{' '.join(map(repr, COMMAND[:2]))} '{COMMAND[2]}' read corpus | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", script], cwd=learner.folder, capture_output=True, text=True, timeout=180)
    assert ended.stdout.startswith('"""Chapter 01.') and "Traceback" not in ended.stderr
