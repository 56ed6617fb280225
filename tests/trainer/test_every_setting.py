"""Each setting takes effect: for each field of each configuration class, two values whose results differ, or the test that shows it."""

import ast
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
from setting_effects import (
    of_alignment,
    of_answers,
    of_chats,
    of_data,
    of_engine,
    of_model,
    of_optimizer,
    of_parallel,
    of_rewards,
    of_trainer,
)
from setting_effects.effects import Differs, Exempt, Shown, ignored

from shared.course.bounds import Bounds, Length, OutOfBounds, rules_of
from shared.course.paths import CHECKOUT
from shared.course.typed import default_of, members
from shared.trainer.config import TrainerConfig
from shared.trainer.evaluation.tasks import EvalTask
from shared.trainer.pipeline.stages import PipelineEntry
from shared.trainer.talk.chat import AnswerSettings
from shared.trainer.talk.server import Question

ROOTS = [TrainerConfig, EvalTask, PipelineEntry, AnswerSettings, Question]
MODULES = (of_alignment, of_answers, of_chats, of_data, of_engine, of_model, of_optimizer, of_parallel, of_rewards, of_trainer)
TABLES = {table.owner: table for module in MODULES for table in module.ALL}
ROWS = [(owner, name, row) for owner, table in TABLES.items() for name, row in table.rows.items()]


def classes_below(owner: type) -> Iterator[type]:
    """The configuration classes that a class's fields hold, itself first."""
    yield owner
    for hint in get_type_hints(owner).values():
        for member in members(hint):
            for each in (member, *get_args(member)):
                if is_dataclass(each):
                    yield from classes_below(each)


def configurations() -> list[type]:
    return list(dict.fromkeys(each for root in ROOTS for each in classes_below(root)))


def test_each_field_of_each_configuration_class_has_its_row():
    wanted = {f"{owner.__name__}.{entry.name}" for owner in {*configurations(), *TABLES} for entry in fields(owner)}
    assert wanted == {f"{owner.__name__}.{name}" for owner, name, _ in ROWS}


def test_each_class_that_the_core_configures_from_settings_is_one_of_them():
    known = {owner.__name__ for owner in configurations()}
    for path in sorted((CHECKOUT / "shared").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "configured(" in text else []:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "configured" and (name := ast.unparse(node.args[0]))[0].isupper():
                assert name in known, f"{path} configures {name}, whose fields have no rows"


@pytest.mark.parametrize("owner", [each for each in configurations() if rules_of(each)], ids=lambda owner: owner.__name__)
def test_each_bound_and_choice_is_checked_at_construction(owner):
    """A class whose decorator `checked` was forgotten would show bounds in --help and refuse nothing."""
    values = {entry.name: default_of(entry) for entry in fields(owner)}
    for name, allowed, _ in rules_of(owner):
        if values[name] is MISSING:
            values[name] = 1 if isinstance(allowed, Bounds) else () if isinstance(allowed, Length) else allowed[0]
    for name, allowed, _ in rules_of(owner):
        record = object.__new__(owner)
        wrong = ("a",) * (allowed.le + 1) if isinstance(allowed, Length) else math.nan if isinstance(allowed, Bounds) else "no such choice"
        for key, value in (values | {name: wrong}).items():
            object.__setattr__(record, key, value)
        with pytest.raises(OutOfBounds, match=f"^{name} (is|has) "):
            record.__post_init__()


@pytest.mark.parametrize("owner, name, row", [each for each in ROWS if not isinstance(each[2], Differs)], ids=str)
def test_what_is_shown_elsewhere_is_there_and_what_is_not_has_a_reason(owner, name, row):
    if isinstance(row, Exempt):
        assert len(row.reason.split()) > 4
        return
    file, function = row.name.split("::")
    functions = ast.parse((CHECKOUT / "tests" / file).read_text(encoding="utf-8")).body
    assert function in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


SHOWN_HERE = [pytest.param(*each, id=f"{each[0].__name__}.{each[1]}") for each in ROWS if isinstance(each[2], Differs)]
FIRST = {param.values[0]: param for param in reversed(SHOWN_HERE)}  # of each class


@pytest.mark.parametrize(("owner", "name", "row"), SHOWN_HERE)
def test_a_setting_takes_effect(owner, name, row):
    first, second = (TABLES[owner].observed(name, row, value) for value in (row.one, row.other))
    assert first != second, f"{owner.__name__}.{name} changes nothing from {row.one!r} to {row.other!r}"


@pytest.mark.parametrize(("owner", "name", "row"), FIRST.values())
def test_the_same_settings_are_observed_to_be_the_same(owner, name, row):
    """Or nothing would follow from a difference."""
    assert TABLES[owner].observed(name, row, row.one) == TABLES[owner].observed(name, row, row.one, again=True)


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "row"), SHOWN_HERE)
def test_a_setting_that_nobody_reads_changes_nothing(owner, name, row):
    """The negative control of each row."""
    first = TABLES[owner].observed(name, row, row.one)
    with ignored(owner, name, row.one):
        assert TABLES[owner].observed(name, row, row.other, again=True) == first, "something else than this field makes the difference"
