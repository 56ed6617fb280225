"""The maintainers' commands: stubs never over somebody's work, the release recorded, living mutants shown."""

import dataclasses
import json

import pytest
from workspace import Learner

from shared.course import assignments, maintainer_commands, mutants, released
from shared.course.report import FAIL, PASS, Outcome

FIRST = "01.cross_entropy"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A learner's folder that the maintainers' commands take for the checkout."""
    monkeypatch.setattr(maintainer_commands, "CHECKOUT", tmp_path)
    learner = Learner(tmp_path)
    for build in assignments.builds().values():
        build.file(tmp_path).write_text(build.template, encoding="utf-8")
    return learner


def test_stubs_are_written_where_they_differ(checkout):
    fresh = checkout.text
    assert checkout.course("stubs", "--check").exit_code == 0
    checkout.path.write_text(fresh.replace("# The loss", "# A loss"), encoding="utf-8")
    differing = checkout.course("stubs", "01", "--check")
    assert differing.exit_code == 1 and "`course stubs 01` writes it" in differing.stdout
    assert checkout.course("stubs").exit_code == 0 and checkout.text == fresh
    checkout.path.unlink()
    assert checkout.course("stubs", "01").exit_code == 0 and checkout.text == fresh


def test_stubs_are_never_written_over_work(checkout):
    fresh = checkout.text
    checkout.write("cross_entropy")
    edited = checkout.text
    refused = checkout.course("stubs")
    assert refused.exit_code == 64 and f"holds a learner's work: {FIRST}" in refused.stderr and checkout.text == edited
    assert checkout.course("stubs", "--force").exit_code == 0 and checkout.text == fresh
    [saved] = (checkout.progress.folder / "saved").iterdir()
    assert saved.read_text(encoding="utf-8") == edited


def test_release_records_what_the_core_is(checkout, monkeypatch):
    manifest = checkout.folder / "released.json"
    monkeypatch.setattr(released, "MANIFEST", manifest)
    monkeypatch.setattr(released, "CHECKOUT", checkout.folder)
    core = checkout.folder / "shared"
    core.mkdir()
    (core / "loop.py").write_text("one")
    assert released.edited() == ["released.json"]
    assert checkout.course("release").exit_code == 0
    assert list(json.loads(manifest.read_text())["files"]) == ["shared/loop.py"]
    assert checkout.course("release", "--check").exit_code == 0 and released.edited() == []
    (core / "loop.py").write_text("two")
    (core / "new.py").write_text("added")
    assert released.edited() == ["shared/loop.py", "shared/new.py"]
    assert checkout.course("release", "--check").exit_code == 1


def test_mutants_that_live_or_are_not_named_end_with_code_1(checkout, monkeypatch):
    real = mutants.mutants_of(FIRST)[0]
    harmless = dataclasses.replace(real, name="harmless", find="counted = targets != -100", replace="counted = ~(targets == -100)")
    listed = {FIRST: (real,)}
    monkeypatch.setattr(mutants, "mutants_of", lambda exercise: listed.get(exercise, ()))
    rejected = checkout.course("mutants", "01")
    assert rejected.exit_code == 0 and "1 of 1 mutant rejected with their own sentence." in rejected.stdout
    listed[FIRST] = (real, harmless)
    alive = checkout.course("mutants")
    assert alive.exit_code == 1 and "ALIVE" in alive.stdout and "1 of 2 mutants" in alive.stdout
    listed.clear()
    assert checkout.course("mutants").exit_code == 64


def test_a_verdict_wants_the_mutants_own_sentence():
    mutant = mutants.mutants_of(FIRST)[0]
    assert maintainer_commands.verdict(mutant, Outcome(FIRST, PASS)) == "ALIVE"
    assert maintainer_commands.verdict(mutant, Outcome(FIRST, FAIL, misconception=mutant.sentence)) == maintainer_commands.REJECTED
    assert maintainer_commands.verdict(mutant, Outcome(FIRST, FAIL, misconception="Else.")) == "another's sentence: Else."
    assert maintainer_commands.verdict(mutant, Outcome(FIRST, FAIL)) == "no sentence"
