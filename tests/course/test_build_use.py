"""A run script uses a learner's build where every stage passed on its present text, and nowhere else."""

import pytest
from workspace import Learner

from shared.course import binding
from shared.course.assignments import builds, fingerprint
from shared.course.build_check import build_line, passed_build
from shared.course.catalogue import chapters
from shared.course.paths import CHECKOUT
from shared.course.stubs import BodyFile

BUILD = builds()["07.build"]


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Somebody whose build of chapter 07 passed whole, in a run with `--impl mine`."""
    learner = Learner(tmp_path)
    text = "\n\n".join(f'def {name}():\n    return "mine"\n' for name in BUILD.adapters)
    BUILD.file(tmp_path).write_text(text, encoding="utf-8")
    chosen(monkeypatch, tmp_path, "mine")
    record(learner)
    return learner


def chosen(monkeypatch, folder, implementation: str) -> None:
    monkeypatch.setattr(binding, "_process", binding.Process(binding.Choice(implementation, folder, {})))


def record(learner, but: str = "") -> None:
    text = fingerprint(BodyFile.read(BUILD.file(learner.folder)))
    for stage in BUILD.stages:
        learner.progress.record_check(stage.id, text if stage.name != but else None)


@pytest.mark.parametrize("implementation", ["mine", "mixed"])
def test_a_build_that_passed_whole_is_used(learner, monkeypatch, implementation):
    chosen(monkeypatch, learner.folder, implementation)
    functions = passed_build("07")
    assert {getattr(functions, name)() for name in BUILD.adapters} == {"mine"}
    assert "07.build runs" in build_line("07")


def test_a_run_of_the_reference_asks_for_no_build(learner, monkeypatch):
    chosen(monkeypatch, learner.folder, "reference")
    assert passed_build("07") is None and "IMPL=mine" in build_line("07")


def test_one_stage_that_did_not_pass_keeps_a_build_out(learner):
    record(learner, but=BUILD.stages[-1].name)
    assert passed_build("07") is None and "8 of 9 stages passed" in build_line("07")


def test_a_text_that_changed_since_it_passed_is_not_used(learner):
    file = BUILD.file(learner.folder)
    file.write_text(file.read_text(encoding="utf-8") + "\n# a remark\n", encoding="utf-8")
    assert passed_build("07") is not None, "comments do not count"
    file.write_text(file.read_text(encoding="utf-8") + "\nCHANGED = True\n", encoding="utf-8")
    assert passed_build("07") is None and "0 of 9 stages passed on the present text" in build_line("07")


@pytest.mark.parametrize("text", [None, "def broken(:\n", BUILD.template])
def test_a_build_that_is_missing_broken_or_untouched_is_not_used(learner, text):
    file = BUILD.file(learner.folder)
    file.unlink()
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert passed_build("07") is None and "not written yet" in build_line("07")


@pytest.mark.parametrize("number", ["01", "02", "03", "04", "05", "06"])
def test_a_run_uses_its_chapters_build_or_says_that_it_does_not(number):
    text = (CHECKOUT / "chapters" / chapters()[number].slug / "run.py").read_text(encoding="utf-8")
    assert (f'passed_build("{number}")' in text and f'build_line("{number}")' in text) or f'unused_line("{number}"' in text
