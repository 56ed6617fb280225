"""Chapter 12. The process that computes rewards of texts, apart from training: one that hangs or breaks it costs no training.

    python -m shared.rl.reward_worker        asked by `shared.rl.reward_process`, over its standard input and output, in lines of JSON

The first line names the functions and how long a call may take, and each later one holds calls, which are answered one by one: a number,
or {"error": why not}.
"""

import faulthandler
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from shared.course.errors import CourseError
from shared.course.extensions import bound
from shared.rl.verifiers import MATH, VERIFIERS, math_reward

Function = Callable[[str, str, str], Any]  # prompt, answer, expected answer -> a number


def function_of(name: str, settings: str | dict | None) -> Function:
    """A verifier; the format with its pattern; or a function by import path with its options."""
    if isinstance(settings, str):
        return partial(matches, re.compile(settings))
    if name in VERIFIERS:
        if name == MATH:
            math_reward("x^2 + 2x + 1", "(x + 1)^2")  # imports sympy and its parser, which takes seconds: not within an answer's limit
        return partial(verified, VERIFIERS[name])
    return bound(name, settings or {}, "grpo.rewards", "prompt", "answer", "expected")


def matches(pattern: re.Pattern, prompt: str, answer: str, expected: str) -> bool:
    return pattern.fullmatch(answer) is not None


def verified(verify: Callable[[str, str], float], prompt: str, answer: str, expected: str) -> float:
    return verify(answer, expected)


def attempt(function: Callable, *arguments: Any) -> Any:
    """What a function gives, or in words why it gives nothing."""
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
        return {"error": said.rstrip(".: ")}


def number(function: Function, *texts: str) -> float:
    found = function(*texts)
    if found is None:
        raise TypeError("it returned None, and a number is needed")
    return float(found)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks; when that one ends, so does the input here
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward prints is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    functions: dict[str, Any] = {}
    given = json.loads(sys.stdin.readline())
    for name, settings in given["functions"].items():
        functions[name] = attempt(function_of, name, settings)
    answer({name: made["error"] for name, made in functions.items() if isinstance(made, dict)})
    for line in sys.stdin:
        for name, *texts in json.loads(line):
            # Who asks ends a process that hangs. Where that one has been killed, this ends by itself, somewhat later.
            faulthandler.dump_traceback_later(2 * given["seconds"] + 5, exit=True)
            found = attempt(number, functions[name], *texts)
            faulthandler.cancel_dump_traceback_later()
            answer(found)


if __name__ == "__main__":
    main()
