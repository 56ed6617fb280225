"""Chapter 12. Verifiers: functions of an answer and the expected one that say whether, or how far, the answer is right.

    number      the last number equals the expected one, as an exact rational (exercise `number_reward`)
    exact, math, python, json, near, lines, function      as in `shared.rl.text_verifiers`

Code is judged by running it, elsewhere (`shared.rl.code_reward`).
"""

from collections.abc import Callable

from shared.rl.number_reward import number_reward
from shared.rl.text_verifiers import TEXT_VERIFIERS

CODE, NUMBER = "code", "number"
REASONED = r"(?s)<think>.*?</think>\s*<answer>.*?</answer>\s*"  # as DeepSeek-R1 was asked to answer (2025, table 1)
VERIFIERS: dict[str, Callable[[str, str], float]] = TEXT_VERIFIERS | {NUMBER: number_reward}
CHECKS = (*VERIFIERS, CODE)  # that a task may have
