"""Chapter 12. Verifiers that need no torch, so that a process which only computes rewards starts quickly.

    exact       the same text, but for spaces around it
    math        equal as mathematics: fractions, roots, sets, intervals, equations (math-verify)
    python, json, near, lines, function      as in chapters 10 and 11

An answer that cannot be read is wrong. An expected answer that cannot be read is an error, because a
model would learn from a 0 there to be wrong.
"""

import logging
import re
from collections.abc import Callable

from shared.preference.answer_scores import SCORES

MATH = "math"
BOX = re.compile(r"\\boxed\s*\{")
SET = re.compile(r"^\{(.*)\}$")
UNIT = re.compile(r"\\(text|mathrm|mbox)\s*\{[^{}]*\}")
WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")  # of a sentence; commands of LaTeX begin with a backslash


def exact_reward(answer: str, expected: str) -> float:
    return float(answer.strip() == expected.strip())


def math_reward(answer: str, expected: str) -> float:
    """1.0 where an answer is the expected text, or math-verify takes it for equal to that.

    Four readings of the library's (0.9) are corrected. Of several `\\boxed{}` the last one counts; it joins those of one line into a set.
    Text that is a formula and no sentence is read as one: of `2x`, `1,-2` and `3\\sqrt{13}` it takes a number. So is an answer that repeats
    the expected text right, whatever it reads in it; and `{1,2}` is the set.

    Kept are the others. Its two sides are not alike, and the expected answer stands first: `[0,1)` is then not answered by `0 <= x < 1`,
    though the other way round it would be. 50% equals both 0.5 and 50; a unit is left out (`10 cm` is 10); 0.333 is not 1/3; `x = 5` is 5;
    of a sentence without a formula the last number counts. It takes no time limit here, because its own works in a main thread alone.

    Raises:
        ValueError: the expected answer cannot be read.
    """
    import math_verify  # sympy takes half a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    wanted = read_math(expected)
    if not wanted:
        raise ValueError(f"the expected answer {expected!r} is nothing that math-verify reads")
    if (last_box(answer) or answer).strip() == (last_box(expected) or expected).strip():
        return 1.0
    return float(math_verify.verify(wanted, read_math(answer), timeout_seconds=None))


def read_math(text: str) -> list:
    """What math-verify reads in a text: in its last box, else in its formulas or sentences."""
    import math_verify

    def parsed(formula: str) -> list:
        return math_verify.parse(formula, parsing_timeout=None)

    if (boxed := last_box(text)) is not None:
        return parsed(f"$\\boxed{{{boxed}}}$") or parsed(f"${boxed}$")
    if "$" in text or "\\boxed" in text:
        return parsed(text)
    formula = SET.sub(r"\\{\1\\}", text.strip())
    first, then = (f"${formula}$", text) if not WORD.search(UNIT.sub("", text)) else (text, f"${text}$")
    return parsed(first) or parsed(then)


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` that is closed."""
    found = None
    for opening in BOX.finditer(text):
        depth = 1
        for place in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                found = text[opening.end() : place]
                break
    return found


# Without chapter 10's check `number`: here that name stands for the exercise `number_reward`, in `shared.rl.verifiers`.
TEXT_VERIFIERS: dict[str, Callable[[str, str], float]] = {
    **{name: score for name, score in SCORES.items() if name != "number"},
    "exact": exact_reward,
    MATH: math_reward,
}
