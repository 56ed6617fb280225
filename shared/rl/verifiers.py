"""Chapter 12. Verifiers: functions of an answer and the expected one that say whether, or how far, the answer is right.

    number      the last number equals the expected one, as an exact rational (exercise `number_reward`)
    exact       the same text, but for spaces around it
    math        equal as mathematics: fractions, roots, sets, intervals, equations (math-verify)
    python, json, near, lines, function      as in chapters 10 and 11

An answer that cannot be read is wrong. An expected answer that cannot be read is an error, because a
model would learn from a 0 there to be wrong. Code is judged by running it, elsewhere (`shared.rl.code_reward`).
"""

import logging
from collections.abc import Callable

from shared.preference.made_preferences import SCORES
from shared.rl.number_reward import number_reward

CODE, MATH = "code", "math"
REASONED = r"(?s)<think>.*?</think>\s*<answer>.*?</answer>\s*"  # as DeepSeek-R1 was asked to answer (2025, table 1)


def exact_reward(answer: str, expected: str) -> float:
    return float(answer.strip() == expected.strip())


def math_reward(answer: str, expected: str) -> float:
    """1.0 where math-verify takes an answer for equal to the expected one.

    Its two sides are not alike, and the expected answer stands first: `[0,1)` is then not answered by `0 <= x < 1`, though the other way
    round it would be. 50% equals both 0.5 and 50. It takes no time limit here, because its own works in a main thread alone.

    Raises:
        ValueError: the expected answer cannot be read.
    """
    import math_verify  # sympy takes half a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit

    def parsed(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None)

    wanted = parsed(expected if "$" in expected or "\\boxed" in expected else f"${expected}$")
    if not wanted:
        raise ValueError(f"the expected answer {expected!r} is nothing that math-verify reads")
    given = parsed(answer) or parsed(f"${answer}$")
    return float(math_verify.verify(wanted, given, timeout_seconds=None))


VERIFIERS: dict[str, Callable[[str, str], float]] = SCORES | {"number": number_reward, "exact": exact_reward, MATH: math_reward}
CHECKS = (*VERIFIERS, CODE)  # that a task may have
