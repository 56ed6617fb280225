"""How the suite is shared out: what stays together, the longest first, and the file of durations that says which these are."""

import json
from types import SimpleNamespace

import pytest
import scopes
from scopes import Recorder, place, scope_of

from shared.course.paths import CHECKOUT


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/optim/test_updater.py::test_a[05.adamw]", "tests/optim/test_updater.py"),
        ("tests/course/test_checks.py::test_the_cases_climb[05.adamw_update]", "tests/course/test_checks.py 05"),
        ("tests/course/test_builds.py::test_the_solution_passes_every_stage[07.build]", "tests/course/test_builds.py 07"),
        ("tests/course/test_builds.py::test_right_builds[07_tensor_parallel-right_rows]", "tests/course/test_builds.py 07"),
        ("tests/course/test_hunts.py::test_a_hunt_from_the_list_to_the_reason", "tests/course/test_hunts.py"),
        ("tests/course/test_notebooks.py::test_the_size[01_training_loop]", "tests/course/test_notebooks.py"),
    ],
)
def test_a_file_stays_together_and_a_long_one_by_chapters(nodeid, scope):
    assert scope_of(nodeid) == scope


def test_each_notebook_is_executed_wherever_a_worker_is_free():
    names = [f"tests/course/test_notebooks.py::{scopes.ALONE}[{slug}]" for slug in ("01_training_loop", "02_transformer")]
    assert [scope_of(name) for name in names] == names


@pytest.fixture
def known(monkeypatch, tmp_path):
    monkeypatch.setattr(scopes, "DURATIONS", tmp_path / "durations.json")
    scopes.durations.cache_clear()
    yield scopes.DURATIONS
    scopes.durations.cache_clear()


def test_the_longest_comes_first_and_what_is_new_before_it(known):
    known.write_text(json.dumps({"a.py": 1.0, "b.py": 9.0}))
    items = [SimpleNamespace(nodeid=f"{name}.py::test") for name in ("a", "b", "new")]
    assert [item.nodeid[0] for item in sorted(items, key=place)] == ["n", "b", "a"]


def test_a_run_writes_down_what_each_scope_took_and_forgets_files_that_are_gone(known, tmp_path):
    known.write_text(json.dumps({"a.py": 1.0, "b.py": 9.0, "gone.py": 5.0}))
    (tmp_path / "a.py").touch(), (tmp_path / "b.py").touch()
    recorder = Recorder()
    for seconds in (2.0, 0.25):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="a.py::test", duration=seconds))
    session = SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path))
    recorder.pytest_sessionfinish(session)
    assert json.loads(known.read_text()) == {"a.py": 2.2, "b.py": 9.0}
    session.config.workerinput = {}
    known.unlink()
    recorder.pytest_sessionfinish(session)
    assert not known.exists(), "a worker has seen a part only"


def test_the_durations_are_of_files_that_there_are():
    recorded = json.loads((CHECKOUT / "tests" / "durations.json").read_text(encoding="utf-8"))
    assert recorded and all((CHECKOUT / scope.split("::")[0].split(" ")[0]).exists() for scope in recorded)
