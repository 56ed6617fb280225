"""`check: math` on answers as models and data sets write them: bare LaTeX, several boxes, sets, intervals, units, percentages, phrases."""

from concurrent.futures import ThreadPoolExecutor

import math_verify
import pytest

from shared.rl.tasks import TasksConfig, task_of
from shared.rl.text_verifiers import math_reward

BOXED = [
    ("5", r"First \boxed{4}. No: \boxed{5}", 1), ("4", r"<think>maybe \boxed{3}</think> \boxed{4}", 1), ("5", r"\boxed {5}", 1),
    (r"\{4,5\}", r"First \boxed{4}. No: \boxed{5}", 0), (r"\{4,5\}", r"\boxed{\{4,5\}}", 1),
    (r"\frac{3}{4}", r"so \boxed{\frac{3}{4}}.", 1),
    ("5", r"\boxed{5", 0), ("5", r"\boxed{5} and then \boxed{", 1),
]  # fmt: skip
BARE = [
    "2x", "1,-2", "6 - 5i", "y = 2x+3", r"3\sqrt{13}", "1e5", r"(-\infty, 2) \cup (3, \infty)", r"\left( 3, \frac{\pi}{2} \right)", "2k+2",
    "{1,2}", r"\frac12", "[0,1)", "10 cm", "42 apples", r"10\text{ cm}", r"\text{Evelyn}", "50%", "x=5", "1,000", "-7", "3/4",
    r"\dfrac{3}{4}",
]  # fmt: skip
OTHERS = [
    ("2", "2x", 0), ("2x", "2", 0), ("42", "42 apples", 1), ("10", "10 cm", 1), ("10", "The distance is 10 cm.", 1), ("7", "7.", 1),
    ("7", "I get 3, then 7", 1), ("5", "x=5", 1), ("1000", "1,000", 1), ("8", "2^3", 1), (r"\frac{1}{2}", "0.5", 1),
    (r"\{1,2\}", "{1,2}", 1), (r"\{1,2\}", r"$\{2,1\}$", 1), ("12", "The result is 12 apples and 3 pears", 0),
]  # fmt: skip
KEPT = [("1/3", "0.333", 0), ("0.5", "50%", 1), ("50", "50%", 1), ("[0,1)", "0 <= x < 1", 0), ("-2,1", "1,-2", 1)]  # math-verify's


@pytest.mark.parametrize(("expected", "answer", "right"), [*BOXED, *OTHERS, *KEPT])
def test_what_an_answer_says_is_judged(expected, answer, right):
    assert math_reward(answer, expected) == right


@pytest.mark.parametrize("text", BARE)
def test_an_answer_that_repeats_the_expected_text_is_right_and_a_task_with_it_is_taken(text):
    for answer in (text, f"\\boxed{{{text}}}", f"The answer is \\boxed{{{text}}}.", f"${text}$"):
        assert math_reward(answer, text) == 1
    assert task_of({"prompt": "q", "answer": text}, "tasks.jsonl:1", TasksConfig(check="math")).answer == text


def test_answers_are_judged_in_any_thread():
    """Where the library's own time limits, which are signals, are refused."""
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="threaded environment"):
            pool.submit(math_verify.parse, "$2$").result()
        assert pool.submit(math_reward, "1/2", "0.5").result() == 1
