"""Chapter 12. Time limit for rewards: they are computed in a child process, which is killed where one hangs.

A signal would not do: Python looks at it between two operations only, and one of C, such as a large power, can take a day.

    python -m shared.rl.reward_process        the child: asked over its standard input and output, in lines of JSON

The first line names the functions and how long a call may take; each later one holds calls, which are answered one by one: a number, null
where the reward is not for this task, or {"error": why not}. It imports torch for the verifier `number` alone, or where a function of your
own does: one that hangs costs its time limit and a tenth of a second or two, no start of torch.
"""

import faulthandler
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shared.course.errors import CourseError
from shared.course.extensions import bound, is_import_path
from shared.rl.text_verifiers import MATH, TEXT_VERIFIERS, math_reward

START = 300.0  # seconds; a busy machine takes a while to import torch
Call = tuple[str, str, str, str]  # the name of a reward, prompt, answer, expected answer
Result = float | str | None  # a number, why it failed, or None
Function = Callable[[str, str, str], Any]  # prompt, answer, expected answer -> a number, or None where it is for other tasks


class RewardProcess:
    """Computes rewards of texts.

    Args:
        functions: by name: None for a verifier, the pattern of a format, or the options of a function by import path. Verifiers that calls
            name besides are loaded when they do. Without any, no process is started yet.
        seconds: that one reward may take, loading apart.
    """

    def __init__(self, functions: Mapping[str, str | None | dict[str, Any]], seconds: float):
        self.functions, self.seconds = dict(functions), seconds
        self.process: subprocess.Popen | None = None
        if functions:
            self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "shared.rl.reward_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.unread = b""
        self.send({"functions": self.functions, "seconds": self.seconds})
        failed = self.receive(START)
        if failed != {}:
            self.close()
            name, reason = next(iter(failed.items())) if isinstance(failed, dict) else (next(iter(self.functions)), failed)
            reason = reason if reason.endswith((".", "?")) else f"{reason}."
            raise CourseError(
                f"The reward {name} cannot be loaded: {reason} Give a function of your own by import path, such as "
                "my_module.my_reward, of a prompt, an answer and the expected answer, or a name of the course's."
            )

    def __call__(self, calls: Sequence[Call], until: Callable[[Result], Any] = lambda result: False) -> list[Result]:
        """For each call its number, which may be NaN, or None, or an error message.

        Args:
            until: return with the first result of which this is true: one call that hangs costs `seconds`, and many cost no more.
        """
        found: list[Result] = []
        if missing := dict.fromkeys(name for name, *_ in calls if name not in self.functions):
            self.functions = missing | self.functions
            self.close()
        while len(found) < len(calls) and not (found and until(found[-1])):
            if self.process is None:
                self.start()
            self.send(calls[len(found) :])
            while len(found) < len(calls) and self.process is not None:
                answer = self.receive(self.seconds)
                if isinstance(answer, str):
                    self.close()
                found.append(answer["error"] if isinstance(answer, dict) else answer)
                if len(found) < len(calls) and until(found[-1]):
                    self.close()  # it computes the others
        return found

    def send(self, value: Any) -> None:
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # what is received says so
            pass

    def receive(self, seconds: float) -> Any:
        """The next result; or an error message, after which the process must be restarted."""
        channel, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.unread:
            ready, _, _ = select.select([channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return f"it took more than {seconds:g} seconds"
            read = os.read(channel, 1 << 16)
            if not read:
                return "it ended the process that computes rewards"
            self.unread += read
        line, self.unread = self.unread.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()

    __del__ = close


# The child.


def function_of(name: str, settings: str | dict | None) -> Function:
    """A verifier; the format with its pattern; or a function by import path with its options."""
    if isinstance(settings, str):
        return partial(matches, re.compile(settings))
    if is_import_path(name):
        return bound(name, settings or {}, "grpo.rewards", "prompt", "answer", "expected")
    if name == MATH:
        math_reward("x^2 + 2x + 1", "(x + 1)^2")  # imports sympy and its parser, which takes seconds: not within an answer's limit
    if name not in TEXT_VERIFIERS:
        from shared.rl.verifiers import VERIFIERS  # with number, an exercise: the file of its body imports torch

        return partial(verified, VERIFIERS[name])
    return partial(verified, TEXT_VERIFIERS[name])


def matches(pattern: re.Pattern, prompt: str, answer: str, expected: str) -> bool:
    return pattern.fullmatch(answer) is not None


def verified(verify: Callable[[str, str], float], prompt: str, answer: str, expected: str) -> float:
    return verify(answer, expected)


def attempt(function: Callable, *arguments: Any) -> Any:
    """The result of a function, or its error message."""
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
        return {"error": said.rstrip(".: ")}


def number(function: Function, *texts: str) -> float | None:
    found = function(*texts)
    return None if found is None else float(found)


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
