"""`make test BASE=rev` runs what a change concerns, whichever folder it stands in, and little else."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from changed import Affected, changed_files, nearest_tests
from dependencies import Dependencies

from shared.course.paths import CHECKOUT


@pytest.fixture(scope="module")
def graph():
    return Dependencies(CHECKOUT)


def item(name: str, parameters: str = "") -> SimpleNamespace:
    """A collected test, as far as the choice looks at it."""
    found = SimpleNamespace(path=CHECKOUT / name)
    return SimpleNamespace(**vars(found), callspec=SimpleNamespace(id=parameters)) if parameters else found


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("shared/data/loader.py", "tests/finetune/test_chat_rows.py"),  # of another chapter, which `CHAPTER=03` leaves out
        ("shared/optim/loss_scale.py", "tests/model/test_auxiliary_loss.py"),
        ("shared/parallel/data/ddp.py", "tests/parallel/test_ddp.py"),
        ("solutions/05_optimizers.py", "tests/optim/test_optimizers.py"),  # bound into the core, imported by nobody
        ("chapters/05_optimizers/run.py", "tests/optim/test_05_run.py"),  # a script that a test starts
        ("chapters/12_grpo/laptop.yaml", "tests/trainer/test_plan_command.py"),  # found by a pattern
        ("chapters/12_grpo/cluster/train.sbatch", "tests/trainer/test_cluster.py"),
        ("tests/support/tuned_runs.py", "tests/trainer/test_chat.py"),
        ("README.md", "tests/course/test_setup.py"),
        ("pyproject.toml", "tests/loop/test_devices.py"),  # changes everything
    ],
)
def test_a_test_that_depends_on_a_changed_file_is_run(graph, changed, test):
    assert (CHECKOUT / changed).exists() and (CHECKOUT / test).exists()
    assert item(test) in Affected(graph, {changed})


@pytest.mark.parametrize(
    ("changed", "test", "parameters", "runs"),
    [
        ("tests/exercises/checks/05_optimizers/adamw_update.py", "test_checks.py", "05.adamw_update", True),
        ("tests/exercises/checks/05_optimizers/adamw_update.py", "test_checks.py", "05.lion_update", False),
        ("tests/exercises/mutants/05.toml", "test_checks.py", "05.lion_update", True),
        ("tests/exercises/mutants/05.toml", "test_checks.py", "07.column_linear", False),
        ("shared/course/checking.py", "test_checks.py", "07.column_linear", True),
        ("shared/model/rope.py", "test_notebooks.py", "02_transformer", True),
        ("shared/rl/rewards.py", "test_notebooks.py", "02_transformer", False),
        ("notebooks/02_transformer.ipynb", "test_notebooks.py", "03_data_pipeline", False),
        ("shared/rl/sandbox/pool.py", "test_conventions.py", "shared/rl/sandbox/pool.py", True),
        ("shared/rl/sandbox/pool.py", "test_conventions.py", "shared/model/rope.py", False),
        ("solutions/builds/07_tensor_parallel.py", "test_builds.py", "07.build-second_bias", True),
        ("solutions/builds/07_tensor_parallel.py", "test_builds.py", "08.build", False),
    ],
)
def test_of_what_is_judged_one_by_one_only_what_changed_is_run(graph, changed, test, parameters, runs):
    assert (item(f"tests/course/{test}", parameters) in Affected(graph, {changed})) == runs


def test_a_leaf_of_the_core_concerns_few_tests(graph):
    tests = [path.relative_to(CHECKOUT).as_posix() for path in CHECKOUT.glob("tests/*/test_*.py")]
    few = {test for test in tests if item(test) in Affected(graph, {"shared/trainer/planner/seconds.py"})}
    assert {"tests/trainer/test_planner.py", "tests/trainer/test_plan_command.py"} <= few and len(few) < len(tests) / 4


def test_the_nearest_tests_come_first(graph):
    first = nearest_tests(graph, "shared/rl/sandbox/pool.py")[:4]
    assert "tests/rl/test_sandbox.py" in first


def test_a_file_that_is_gone_concerns_what_still_names_it(graph):
    gone = Affected(graph, {"shared/optim/sophia.py", "tests/support/runs_that_were.py"})
    assert item("tests/course/test_changed.py") in gone  # this very line names sophia
    assert item("tests/loop/test_devices.py") not in gone


def test_nothing_is_run_where_nothing_changed(graph):
    assert item("tests/loop/test_devices.py") not in Affected(graph, set())


def test_new_and_changed_files_are_found(tmp_path):
    import subprocess

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    Path(tmp_path, "kept.py").write_text("1\n")
    Path(tmp_path, "edited.py").write_text("1\n")
    Path(tmp_path, "gone.py").write_text("1\n")
    git("add", "."), git("commit", "-m", "first")
    Path(tmp_path, "edited.py").write_text("2\n")
    Path(tmp_path, "new.py").write_text("3\n")
    Path(tmp_path, "gone.py").unlink()
    assert changed_files("HEAD", tmp_path) == {"edited.py", "new.py", "gone.py"}
    with pytest.raises(pytest.UsageError, match=re.escape("BASE=no-such: git knows no such commit")):
        changed_files("no-such", tmp_path)
