"""Comparing an observation with what was expected: which values agree, and what is printed where they do not."""

import math

import pytest
import torch
from torch import tensor

from shared.course.comparing import Said, difference, differences, flatten, written
from shared.parallel.pipeline.schedules import Action

NAN, DOUBLE = math.nan, torch.float64


@pytest.mark.parametrize(
    ("expected", "observed"),
    [
        (NAN, NAN),
        (tensor([1.0, NAN]), tensor([1.0, NAN])),
        (math.inf, math.inf),
        (2.0, 2.0 + 1e-4),
        (0.0, 1e-6),
        (tensor([2.0, 0.0]), tensor([2.0 + 1e-4, 1e-6])),
        (tensor([True, False]), tensor([True, False])),
        (None, None),
        ("a", "a"),
    ],
)
def test_what_agrees(expected, observed):
    assert difference(expected, observed, rtol=1e-4, atol=1e-5) is None


@pytest.mark.parametrize(
    ("expected", "observed", "note"),
    [
        (NAN, 0.0, ""),
        (0.0, NAN, ""),
        (tensor([1.0, NAN]), tensor([NAN, 1.0]), ""),
        (math.inf, -math.inf, ""),
        (2.0, 2.001, ""),
        (2.0, 2.0000009, "(they differ by up to 9e-07, which is too much)"),
        (tensor([1.0, 2.0]), tensor([[1.0, 2.0]]), "(shape [1, 2], expected [2])"),
        (tensor([1.0]), tensor([1.0], dtype=DOUBLE), "(torch.float64, expected torch.float32)"),
        (torch.zeros(13), torch.eye(13)[4], "(first at [4]: 1, expected 0)"),
        (torch.ones(13), torch.ones(13) + 3e-7 * torch.eye(13)[7], "(they differ by up to"),
        (1, 1.0, "(float in place of int)"),
        (None, 1, ""),
        (1, Said("nothing came out"), ""),
        ("a", "b", ""),
    ],
)
def test_what_does_not_agree_and_what_is_said_of_it(expected, observed, note):
    found = difference(expected, observed, rtol=1e-9, atol=1e-9)
    assert found is not None and found.startswith(note) and bool(found) == bool(note)


def test_lines_name_what_differs_is_missing_or_came_unasked():
    assert differences({"a": 1.0, "b.c": NAN}, {"a": 1.0, "b.c": NAN}, 0.0, 0.0) == []
    assert differences({"a": 1.0, "b": 2}, {"a": 1.5, "c": 3}, 0.0, 0.0) == [
        "came out  a = 1.5", "expected  a = 1", "missing   b", "came out  c = 3",
    ]  # fmt: skip
    assert differences({"raised": "ValueError"}, {"returned": None}, 0.0, 0.0)[0] == "came out  None"
    assert differences({"a": 1}, {"raised": "KeyError"}, 0.0, 0.0) == ["came out  an exception", "expected  a = 1"]


def test_nested_results_become_dotted_names_and_lists_of_numbers_stay_whole():
    assert flatten({"a": {"b": 1}, "c": [1, 2.0, "x"]}) == {"a.b": 1, "c": [1, 2.0, "x"]}
    assert set(flatten({"c": [tensor(1.0), {"d": 2}]})) == {"c.0", "c.1.d"} and flatten(7) == {"": 7}


def test_a_named_tuple_that_writes_itself_is_printed_so():
    schedule = [[Action("F", 0), Action("B", 1, 1)]]
    assert written(schedule) == "[[F0, B1 of chunk 1]]"
    assert written([(0, 1.5)]) == "[[0, 1.5]]"
