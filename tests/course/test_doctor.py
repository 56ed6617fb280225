"""`course doctor`: each thing that can be wrong is found, said, and told how to mend."""

import collections
import importlib.metadata
import shutil
import sys

import pytest
from workspace import Learner

from shared import corpus
from shared.course import doctor, released
from shared.course.doctor import OK, PROBLEM, WARNING
from shared.parallel import commands


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_a_whole_examination_finds_nothing_that_hinders(learner):
    examined = learner.course("doctor")
    assert examined.exit_code == 0, examined.stdout
    about = [line.split()[1] for line in examined.stdout.splitlines() if line.startswith(("ok ", "warning "))]
    assert {"Python", "command", "packages", "PyTorch", "corpus", "core", "progress", "exercises", "disk"} <= set(about)
    assert "1182 files, 22.0 MB, checksums as recorded" in examined.stdout


def test_a_problem_is_counted_and_ends_with_code_1(learner):
    learner.path.write_text("1 / 0\n", encoding="utf-8")
    examined = learner.course("doctor")
    assert examined.exit_code == 1 and "1 problem" in examined.stdout.splitlines()[-1]
    assert "problem   exercises  chapters/01_training_loop/exercises.py, line 1: ZeroDivisionError" in examined.stdout


def test_another_python_is_a_problem():
    assert doctor.python_version(">=3.11").level == OK
    assert "was tried with Python 3.14 and PyTorch 2.13.0 with CUDA" in doctor.tried("3.14.8")
    assert doctor.tried("3.12.1") == "the course was tried with Python 3.11 and 3.14, and its packages install with 3.12"
    found = doctor.python_version(">=3.99")
    assert found.level == PROBLEM and ">=3.99" in found.sentence and "make install PYTHON=" in found.sentence


def test_packages_missing_moved_or_too_old():
    torch = importlib.metadata.version("torch")
    assert [found.level for found in doctor.packages([f"torch=={torch}", "rich"], {"lab": ["click"]})] == [OK]
    missing, moved, old = doctor.packages(["no-such-package-here", "torch==0.1", "rich>=999"], {})
    assert missing.level == PROBLEM and "no-such-package-here is missing. `make install`" in missing.sentence
    assert moved.level == WARNING and f"torch is {torch}, wanted ==0.1: figures may differ" in moved.sentence
    assert old.level == PROBLEM and "wanted >=999" in old.sentence


def test_a_group_that_is_not_installed_is_no_problem_and_an_old_package_of_one_is():
    all_there, absent, old = doctor.packages(["rich"], {"lab": ["no-such-package-here", "click"], "test": ["rich>=999"]})
    assert all_there.level == absent.level == OK and old.level == PROBLEM
    assert absent.sentence == "1 package of the group lab missing: `make lab` installs what it needs"


def test_a_package_that_cannot_be_imported_is_a_finding():
    def look():
        raise ImportError("no module named torch")

    [found] = doctor.guarded("PyTorch", look)
    assert found.level == PROBLEM and "no module named torch" in found.sentence


def test_a_changed_corpus_is_a_problem(monkeypatch):
    def changed():
        raise corpus.CorpusError("The files of sympy are not those of its wheel.")

    monkeypatch.setattr(corpus, "embedded_corpus", changed)
    [found] = doctor.guarded("corpus", commands.corpus)
    assert found == doctor.Finding(PROBLEM, "corpus", "The files of sympy are not those of its wheel.")


def test_an_edited_core_is_named(monkeypatch):
    monkeypatch.setattr(released, "edited", lambda: [f"shared/file{i}.py" for i in range(7)])
    found = doctor.core()
    assert found.level == WARNING and "7 files not as released: shared/file0.py" in found.sentence and "and 2 more" in found.sentence


def test_a_folder_that_cannot_be_written_is_a_warning(learner):
    assert doctor.writable(learner.folder).level == OK
    learner.progress.folder.rmdir()
    learner.progress.folder.symlink_to(learner.folder / "nowhere")
    found = doctor.writable(learner.folder)
    assert found.level == WARNING and "passes and hints are forgotten" in found.sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def", "line 1: Python cannot read this file"),
        ("import os\nos._exit(3)\n", "ended the process with exit code 3"),
        ("while True:\n    pass\n", "do not load within 2 s"),
    ],
    ids=["syntax", "exit", "loop"],
)
def test_a_file_that_does_not_load_is_a_problem(learner, text, sentence):
    learner.path.write_text(text, encoding="utf-8")
    [found] = doctor.stub_files(learner.folder, seconds=2.0 if text.startswith("while") else 180.0)
    assert found.level == PROBLEM and sentence in found.sentence


def test_a_missing_file_is_a_problem(learner):
    learner.path.unlink()
    [found] = doctor.stub_files(learner.folder)
    assert found.level == PROBLEM and "`course reset 01` makes a new one" in found.sentence


@pytest.mark.parametrize(("free", "level"), [(6 * 2**30, OK), (2 * 2**30, WARNING), (2**29, PROBLEM)])
def test_little_room_on_the_disk(learner, monkeypatch, free, level):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))
    assert doctor.disk(learner.folder).level == level


def test_the_command_of_another_environment_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on the PATH" in doctor.command_on_path().sentence
    other = tmp_path / "course"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    found = doctor.command_on_path()
    assert found.level == WARNING and "another environment" in found.sentence
    here = tmp_path / "bin"
    here.mkdir()
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    (here / "course").symlink_to(other)
    assert doctor.command_on_path().level == OK
