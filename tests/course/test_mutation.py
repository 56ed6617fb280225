"""Automatic mutation: nearly every small edit of a solution is noticed by its check, and each that is not has a reason."""

import ast
import tomllib

import mutation
import mutation_of_the_core as core
import pytest
from edits import edits_of
from mutation import ALIVE, NOTICED, STUCK, Verdict, survivors_of, tried, verdicts_of

from shared.course import catalogue

EXERCISES = list(catalogue.all_exercises())
AT_MOST_ALIVE = 0.10

TOY = '''
def scaled(x: float, factor: float = 2) -> float:
    """Times the factor."""
    product = factor * x
    return abs(product)
'''


@pytest.fixture(scope="module")
def verdicts():
    """The verdicts on an exercise's edits, once each."""
    found = {}

    def of(exercise_id: str):
        if exercise_id not in found:
            found[exercise_id] = verdicts_of(exercise_id)
        return found[exercise_id]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_every_survivor_has_its_reason_and_every_reason_its_survivor(exercise_id, verdicts):
    alive = {(verdict.edit.before, verdict.edit.after) for verdict in verdicts(exercise_id) if verdict.state == ALIVE}
    explained = {(survivor.before, after) for survivor in survivors_of(exercise_id) for after in survivor.after if survivor.reason}
    assert alive - explained == set(), "edits that live without a reason: add a case, or say in survivors.toml why not"
    assert explained - alive == set(), "edits in survivors.toml that are noticed by now, or made no more"


def test_every_survivor_is_of_an_exercise_and_has_one_reason():
    reasons = tomllib.loads(mutation.SURVIVORS.read_text(encoding="utf-8"))
    assert {exercise for lines in reasons.values() for exercise in lines} <= set(EXERCISES)
    explained = {name: [(each.before, after) for each in survivors_of(name) for after in each.after] for name in EXERCISES}
    assert all(len(set(edits)) == len(edits) for edits in explained.values())
    assert sum(map(len, explained.values())) > 400


@pytest.mark.slow
def test_few_edits_survive(verdicts):
    every = [verdict for exercise_id in EXERCISES for verdict in verdicts(exercise_id)]
    alive = sum(verdict.state == ALIVE for verdict in every)
    assert len(every) >= 30 * len(EXERCISES)
    assert alive / len(every) <= AT_MOST_ALIVE


def test_the_rules_make_the_edits_that_they_promise():
    edits = [(edit.operator, edit.after) for edit in edits_of(TOY)]
    for expected in [
        ("ReplaceBinaryOperator_Mul_Add", "product = factor + x"),
        ("NumberReplacer", "def scaled(x: float, factor: float = 3) -> float:"),
        ("statement", "pass"),
        ("call", "return product"),
        ("name", "product = x * x"),
        ("name", "return abs(factor)"),
    ]:
        assert expected in edits
    assert len({edit.source for edit in edits_of(TOY)}) == len(edits)


def test_annotations_and_docstrings_are_not_edited():
    assert all("abs" in edit.before or "product" in edit.before or "factor: float = 2" in edit.before for edit in edits_of(TOY))
    assert not any("|" in edit.after for edit in edits_of("def f(x: int | None):\n    return x\n"))


def test_what_comes_after_an_edit_that_got_stuck_is_tried_in_a_fresh_process(monkeypatch):
    """A thread that it left behind would take the time of those after it, and they would seem to be stuck as well."""
    begun = []

    def in_child(function, exercise_id, edits, seconds):
        begun.append("".join(edits))
        end = next((place for place, edit in enumerate(edits, 1) if edit in "bd"), len(edits))
        return [Verdict(edit, STUCK if edit in "bd" else NOTICED) for edit in edits[:end]]

    monkeypatch.setattr(mutation, "in_child", in_child)
    verdicts = tried("01.any", list("abcde"))
    assert begun == ["abcde", "cde", "e"] and [verdict.edit for verdict in verdicts] == list("abcde")
    assert [verdict.state for verdict in verdicts] == [NOTICED, STUCK, NOTICED, STUCK, NOTICED]


# Of the core.

FLOOR = '''"""Chapter 04. A floor."""

def asked(x: int, y: int) -> int:
    """No statement: `return 0`."""
    if not x and y < 3:
        return asked(x, y)
    elif x:
        x += 2
    return min(
        x, y
    )
'''


def edits_of_floor() -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for node in core.statements(ast.parse(FLOOR)):
        for edit in core.edits_of("shared/a.py", FLOOR, node):
            ast.parse(edit.whole)
            pairs = zip(FLOOR.split("\n"), edit.whole.split("\n"), strict=False)
            assert edit.line == next(number for number, (old, new) in enumerate(pairs, 1) if old != new)
            assert FLOOR.split("\n")[edit.line - 1].strip() == edit.before
            found.setdefault(edit.line, set()).add(edit.after)
    return found


def test_each_kind_of_edit_of_the_core_is_made_and_definitions_are_left_alone():
    found = edits_of_floor()
    assert found.keys() == {5, 6, 8, 9}
    assert {"if  x and y < 3:", "if not x or y < 3:", "if not x and y <= 3:", "if not x and y < 4:"} <= found[5]
    assert {"return asked(y, x)", "pass", "return x"} <= found[6] and {"x += 1", "x += 3", "pass"} <= found[8]
    assert "return min(y, x)" in found[9]


def test_a_seed_draws_the_same_edits_and_each_line_once():
    files = {"shared/a.py": FLOOR, "shared/b.py": FLOOR.replace("asked", "told")}
    draws = [[(edit.path, edit.line, edit.after) for edit in core.drawn(files, 6, seed)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len({place for place in draws[0]}) == 6
    assert {path.split("/")[1] for path in core.sources("04")} == {"engine"}


def test_an_edit_of_the_core_is_taken_back_and_what_fails_without_it_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("right")
    edit = core.Edit("a.py", 1, "right", "wrong", "wrong")
    monkeypatch.setattr(core, "CHECKOUT", tmp_path)
    failing = {"wrong": ["always", "with it"], "right": ["always"]}

    def judged(edit, tests, seconds, left_out=()):
        failed = [name for name in failing[(tmp_path / "a.py").read_text()] if name not in left_out and (name in tests or tests == ["all"])]
        return core.Verdict(edit, core.KILLED if failed else core.ALIVE, *failed[:1] or [""], 1.0)

    monkeypatch.setattr(core, "judged", judged)
    verdict = core.tried(edit, ["all"], 9.0)
    assert (verdict.state, verdict.by) == (core.KILLED, "with it") and (tmp_path / "a.py").read_text() == "right"
    with pytest.raises(ZeroDivisionError), core.edited(edit):
        1 / 0
    assert (tmp_path / "a.py").read_text() == "right"
