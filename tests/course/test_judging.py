"""Judging an answer: which known mistake it shows, how certainly that is said, and that nothing is found out twice."""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.course.checking import Case, Check
from shared.course.comparing import Said, agree, differences
from shared.course.judging import ALSO, ENOUGH, GUESS, NARROW, Judge, run_check
from shared.course.report import FAIL, PASS


def constant_case(**changes) -> Case:
    case = Case("worked example", "one", lambda: {"x": torch.ones(2)}, lambda x: {"y": x + 1}, "arithmetic")
    return replace(case, **changes)


def test_a_right_answer_with_two_mutants_that_do_the_same_gets_no_sentence():
    """The negative control of the mutants' test: sentences that cannot be told apart are not guessed."""
    check = Check("01.cross_entropy", ("y",), [constant_case()], ("y",))
    one, other = {"one": lambda x: x}, {"other": lambda x: x * 1}
    assert run_check(check, lambda x: x, one).misconception == "one"
    assert run_check(check, lambda x: x, one | other).misconception == ""
    assert run_check(check, lambda x: x + 1, one | other).state == PASS


def test_a_mistake_is_known_by_what_its_exception_says_whatever_the_temporary_folder_is_called():
    def opened_in_a_new_folder(name: str):
        with tempfile.TemporaryDirectory() as folder:
            return open(Path(folder) / name)

    case = constant_case(observe=lambda function, **_: function("weights"))
    check, known = Check("01.cross_entropy", ("y",), [case], ("y",)), {"The folder must be there.": opened_in_a_new_folder}
    assert run_check(check, lambda name: opened_in_a_new_folder(name), known).misconception == "The folder must be there."
    assert run_check(check, lambda name: opened_in_a_new_folder(f"other_{name}"), known).misconception == ""


def test_an_answer_that_differs_from_the_mutant_on_a_later_case_gets_a_guess():
    """Two mistakes may look alike on a few inputs: here the other one shows at -1 only."""
    cases = [constant_case(), constant_case(given=lambda: {"x": -torch.ones(2)}), constant_case(given=lambda: {"x": torch.full((2,), 3.0)})]
    check = Check("01.cross_entropy", ("y",), cases, ("y",))
    nothing_added = {"Nothing is added.": lambda x: x}
    assert run_check(check, lambda x: x * 1, nothing_added).misconception == "Nothing is added."
    assert run_check(check, lambda x: x.abs(), nothing_added).misconception == GUESS.format("Nothing is added.")
    assert run_check(check, lambda x: x.abs(), nothing_added, confirm=False).misconception == "Nothing is added."


@pytest.mark.parametrize(("alike", "form"), [(ENOUGH - 1, GUESS), (ENOUGH, ALSO)])
def test_many_inputs_on_which_an_answer_is_wrong_in_the_same_way_make_a_guess_certain(alike, form):
    """And what is right on an input says nothing: an answer and a mutant may both be right there, as any two are."""
    given = [torch.full((2,), float(number)) for number in range(1, alike + 1)] + [-torch.ones(2)] + [torch.zeros(2)] * 9
    cases = [constant_case(given=lambda x=x: {"x": x}, expected=lambda x: {"y": x + x.abs().sign()}) for x in given]
    check = Check("01.cross_entropy", ("y",), cases, ("y",))
    nothing_added = {"Nothing is added.": lambda x: x}
    assert run_check(check, lambda x: x.abs(), nothing_added).misconception == form.format("Nothing is added.")


def test_one_mistake_may_be_written_in_several_ways():
    """Each of its mutants gives the sentence, and both of them, which agree here, are no ambiguity."""
    cases = [constant_case(), constant_case(given=lambda: {"x": torch.tensor([-1.0, 3.0])})]
    check = Check("01.cross_entropy", ("y",), cases, ("y",))
    written = {"Nothing is added.": (lambda x: x, lambda x: x.abs()), "Two is added.": lambda x: x + 2}
    for answer in (lambda x: x * 1, lambda x: x.abs() * 1):
        assert run_check(check, answer, written).misconception == "Nothing is added."
    assert run_check(check, lambda x: x.abs() * 1, {"Nothing is added.": lambda x: x}).misconception == GUESS.format("Nothing is added.")


def test_float64_results_with_the_digits_of_float32_are_named_where_float32_ones_are_right():
    """The commonest slip of people who write `.float()`. A difference in the fourth digit is another mistake."""

    def third_of(dtype: torch.dtype) -> Case:
        return constant_case(given=lambda: {"x": torch.ones(2, dtype=dtype)}, expected=lambda x: {"y": x / 3}, rtol=1e-10)

    def called(answer: Callable, *cases: Case) -> str:
        return run_check(Check("01.cross_entropy", ("y",), list(cases), ("y",)), answer, {}).misconception

    both = third_of(torch.float32), third_of(torch.float64)
    assert called(lambda x: (x.float() / 3).to(x.dtype), *both) == NARROW
    assert called(lambda x: (x.float() / 3).to(x.dtype), third_of(torch.float64)) == NARROW
    assert called(lambda x: x / 3 * (1 + 1e-4 * (x.dtype == torch.float64)), *both) == ""
    assert called(lambda x: x / 3 * (1 + 1e-8), third_of(torch.float64), constant_case(expected=lambda x: {"y": x + 1})) == ""
    assert called(lambda x: (x.float() / 3).to(x.dtype)[:1], *both[::-1]) == ""


def test_a_refusal_in_other_words_hides_no_misconception():
    """Everyone words a refusal in their own way: a case that asks for one tells no two answers apart."""

    def of(message: str) -> Callable:
        def answer(x):
            if x.numel() == 1:
                raise ValueError(message)
            return x

        return answer

    refused = constant_case(given=lambda: {"x": torch.zeros(1)}, expected=lambda x: {"raised": "ValueError"})
    check = Check("01.cross_entropy", ("y",), [refused, constant_case()], ("y",))
    assert run_check(check, of("too short"), {"one": of("give two")}).misconception == "one"


NUMBERS = [torch.full((2,), number) for number in (1.0, -1.0, 3.0, -4.0)]
SAID = {"Nothing is added.": (lambda x: x, lambda x: x * 1), "One is taken.": lambda x: x - 1, "The sign is lost.": lambda x: x.abs() + 1}
ANSWERS = [lambda x: x + 1, lambda x: x + 0, lambda x: x.abs(), lambda x: x - 1, lambda x: x.abs() + 1, lambda x: 1 + x.abs(), lambda x: 2]


def counted(calls: Counter, name: str, function: Callable) -> Callable:
    def call(x):
        calls[name, x[0].item()] += 1
        return function(x)

    return call


def test_a_judge_asks_each_case_and_each_mutant_once():
    """However many answers it judges, and however far each of them is compared."""
    asked: Counter = Counter()
    oracle = counted(asked, "oracle", lambda x: {"y": x + 1})
    cases = [constant_case(given=lambda x=x: {"x": x.clone()}, expected=oracle) for x in NUMBERS]
    said = {name: tuple(counted(asked, f"{name} {way}", each) for way, each in enumerate(of if isinstance(of, tuple) else (of,)))
            for name, of in SAID.items()}  # fmt: skip
    judge = Judge(Check("01.cross_entropy", ("y",), cases, ("y",)), said)
    for answer in ANSWERS:
        judge.judge(answer)
        mine: Counter = Counter()
        judge.judge(counted(mine, "mine", answer))
        assert set(mine.values()) == {1}
    assert set(asked.values()) == {1} and len({name for name, _ in asked}) == 5


def test_what_a_judge_remembers_changes_no_verdict():
    cases = [constant_case(given=lambda x=x: {"x": x.clone()}) for x in NUMBERS]
    check = Check("01.cross_entropy", ("y",), cases, ("y",))
    judge = Judge(check, SAID)
    together, alone = [judge.judge(answer) for answer in ANSWERS], [run_check(check, answer, SAID) for answer in ANSWERS]
    assert [replace(outcome, seconds=0) for outcome in together] == [replace(outcome, seconds=0) for outcome in alone]
    assert [outcome.state for outcome in together] == [PASS] + [FAIL] * 6
    assert [bool(outcome.misconception) for outcome in together] == [False, True, True, True, True, True, False]


def test_an_answer_of_which_no_sentence_is_asked_is_compared_with_none():
    asked: Counter = Counter()
    judge = Judge(Check("01.cross_entropy", ("y",), [constant_case()], ("y",)), {"one": counted(asked, "one", lambda x: x)})
    outcome = judge.judge(lambda x: x, explain=False)
    assert (outcome.state, outcome.misconception) == (FAIL, "") and outcome.problem and not asked


ONES = torch.ones(3)
PAIRS = {
    "equal": ({"y": ONES}, {"y": ONES.clone()}),
    "within the tolerance": ({"y": ONES}, {"y": ONES + 1e-7}),
    "beyond the tolerance": ({"y": ONES}, {"y": ONES + 1e-3}),
    "beyond it in a number": ({"y": 1.0}, {"y": 1.001}),
    "NaN in both": ({"y": ONES * float("nan")}, {"y": ONES * float("nan")}),
    "NaN in one": ({"y": ONES}, {"y": ONES * float("nan")}),
    "NaN in both numbers": ({"y": float("nan")}, {"y": float("nan")}),
    "another shape": ({"y": ONES}, {"y": torch.ones(1, 3)}),
    "another dtype": ({"y": ONES}, {"y": ONES.double()}),
    "whole numbers": ({"y": torch.arange(3)}, {"y": torch.tensor([0, 1, 3])}),
    "a number for a tensor": ({"y": torch.tensor(1.0)}, {"y": 1.0}),
    "words": ({"y": Said("none")}, {"y": "none"}),
    "lists": ({"y": [1, 2]}, {"y": [1, 3]}),
    "nothing": ({"y": None}, {"y": 0}),
    "one result less": ({"y": ONES, "z": 1}, {"y": ONES}),
    "one result more": ({"y": ONES}, {"y": ONES, "it changed its argument": True}),
    "the whole for its parts": ({"y.a": 1, "y.b": 2}, {"y": 3}),
    "an exception": ({"y": ONES}, {"raised": "ValueError"}),
    "the same exception": ({"raised": "ValueError"}, {"raised": "ValueError"}),
    "no exception": ({"raised": "ValueError"}, {"y": ONES}),
}


ALIKE = {"equal", "within the tolerance", "NaN in both", "NaN in both numbers", "the same exception"}


@pytest.mark.parametrize("pair", PAIRS)
def test_results_agree_where_there_is_no_difference_to_show(pair):
    expected, observed = PAIRS[pair]
    assert agree(expected, observed, 1e-6, 0.0) == (differences(expected, observed, 1e-6, 0.0) == []) == (pair in ALIKE)


def test_results_that_print_alike_are_said_to_differ_by_too_much():
    """Not where another place is printed otherwise, whether that differs by too much as well or is near enough."""
    expected = torch.tensor([1e6] * 19 + [0.0], dtype=torch.float64)
    off = torch.tensor([0.01] * 19 + [0.0], dtype=torch.float64)
    last = torch.eye(20, dtype=torch.float64)[19]
    said = [differences({"y": expected}, {"y": expected + each}, 0.0, 1e-3)[1] for each in (off, off + last, off + 1e-4 * last)]
    first = "(first at [0]: they differ by 0.01, which is too much)"
    assert [line.split("   ")[1] for line in said] == ["(they differ by up to 0.01, which is too much)", first, first]
