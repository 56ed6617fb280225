"""Mutants and wrong builds are tables with a key each, so that none hides another of the same name."""

import tomllib

import pytest

from shared.course import catalogue
from shared.course.assignments import builds, read_wrong_builds
from shared.course.errors import CourseError
from shared.course.mutants import read_mutants
from shared.course.paths import CHECKOUT

MUTANTS = sorted((CHECKOUT / "tests" / "exercises" / "mutants").glob("[0-9][0-9].toml"))
WRONG = [build.folder / "wrong.toml" for build in builds().values()]


@pytest.mark.parametrize("path", [*MUTANTS, *WRONG], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_table_that_stands_twice_is_an_error(path):
    text, read = path.read_text(encoding="utf-8"), read_mutants if path in MUTANTS else read_wrong_builds
    first = next(table for table in text.split("\n\n") if table.startswith("["))
    assert len(read(text)) == text.count("\nsays = ") + text.count("\nlike = ") > 20
    with pytest.raises(tomllib.TOMLDecodeError):
        read(f"{text}\n{first}\n")


def test_every_chapter_has_its_file_of_mutants_and_its_wrong_builds():
    assert [path.stem for path in MUTANTS] == [path.parent.name[:2] for path in WRONG] == list(catalogue.chapters())


def test_two_stages_with_a_wrong_build_of_one_name_are_an_error():
    """A test's name holds the wrong build's, not the stage's."""
    entry = 'says = "It is wrong."\nedits = []\n'
    assert list(read_wrong_builds(f"[one.same]\n{entry}[two.other]\n{entry}")) == ["same", "other"]
    with pytest.raises(CourseError, match="same is a wrong build of two stages"):
        read_wrong_builds(f"[one.same]\n{entry}[two.same]\n{entry}")


def test_a_mutant_that_is_like_another_says_the_same():
    edited, like = read_mutants('["01.f".one]\nedit = ["a", "b"]\nsays = "It is b."\n["01.f".two]\nlike = "one"\nbody = "return b"\n')
    assert (edited.exercise, edited.name, edited.find, edited.replace, edited.sentence) == ("01.f", "one", "a", "b", "It is b.")
    assert (like.name, like.body, like.sentence) == ("two", "return b", "It is b.")
