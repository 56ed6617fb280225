"""Every row of the hostile table (tests/hostile/rows) ends as it says, with a sentence and without a traceback."""

import os
import signal
import subprocess
import sys

import hostile
import pytest
from hostile import Row, call, trainer
from trainer_runs import TRAIN

from shared.course.paths import CHECKOUT

ROWS = {f"{theme}: {row.name}": row for theme, rows in hostile.themes().items() for row in rows}


def test_no_two_rows_have_one_name():
    assert len(ROWS) == sum(map(len, hostile.themes().values()))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.check] if name.startswith("folders: ") else ()) for name in ROWS])
def test_a_hostile_input_ends_with_its_sentence(name, tmp_path):
    ended = hostile.run(ROWS[name], tmp_path)
    assert not ended.problems, f"{'; '.join(ended.problems)}\n{ended.output[-2000:]}\n{ended.errors[-4000:]}"


def hangs():
    while True:
        pass


def raises():
    raise KeyError("a bug")


def spoils():
    from pathlib import Path

    next(Path("run/checkpoints").rglob("*.json")).write_text("{}")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row("", call(hangs), seconds=1.0), "did not end within 1 s"),
        (Row("", call(raises), code=1), "a traceback"),
        (Row("", call(spoils), code=0, trained=True), "the run's checkpoints are not what they were"),
        (Row("", trainer("steps=0"), "a sentence that nobody says"), "does not say"),
        (Row("", trainer("steps=0"), code=0), "its exit code is 2 and not 0"),
    ],
)
def test_the_table_would_notice(row, problem, tmp_path):
    """What each row is held to is held: a hang, a traceback, a lost checkpoint, another sentence, another exit code."""
    assert problem in " ".join(hostile.run(row, tmp_path).problems)


def test_ctrl_c_during_imports_is_one_word_and_exit_code_130(tmp_path):
    """While PyTorch is imported: a stand-in says that its import has begun, and takes a minute."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import sys, time\nprint('begun', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    laptop = CHECKOUT / "chapters" / "12_grpo" / "laptop.yaml"
    command, environment = [sys.executable, str(TRAIN), str(laptop)], os.environ | {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr.readline() == "begun\n"
        run.send_signal(signal.SIGINT)
        said = run.stderr.read()
    assert run.returncode == 130 and "Stopped." in said and "Traceback" not in said
