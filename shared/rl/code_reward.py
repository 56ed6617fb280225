"""Chapter 12. A reward from code execution: the function in an answer runs in the sandbox, and its results are compared.

Expected values never enter the sandbox, so a program can neither read them nor decide its own verdict: it sends what its function
returned, or claims to have returned, and the comparison happens here.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.pool import Call, Outcome, Pool
from shared.rl.sandbox.values import encode, same

# One way to match each text: an answer is a stranger's, and a pattern that backtracks could hold up the trainer.
BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:(?:python3?|py)[ \t]*)?\r?\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class CodeTask:
    """A function to write, and its cases: pairs of arguments and the value that the function returns for them.

    Raises:
        ValueError: no case, a function's name that is none, or a value without a form in JSON (`shared/rl/sandbox/values.py`).
    """

    function: str
    cases: tuple[tuple[Sequence[Any], Any], ...]
    forms: tuple[Any, ...] = field(init=False, repr=False, compare=False)  # of the expected values

    def __post_init__(self):
        if not isinstance(self.function, str) or not self.function.isidentifier():
            raise ValueError(f"A code task's function is {self.function!r}: give the name of a Python function.")
        if not self.cases:
            raise ValueError(f"The code task of {self.function} has no cases: give at least one, as [arguments, expected value].")
        for case in self.cases:
            if not isinstance(case, list | tuple) or len(case) != 2 or not isinstance(case[0], list | tuple):
                raise ValueError(f"A case of {self.function} is {case!r}: write [arguments, expected value], with a list of arguments.")
        try:
            encode([list(inputs) for inputs, _ in self.cases])
            object.__setattr__(self, "forms", tuple(encode(expected) for _, expected in self.cases))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"A case of {self.function} cannot be sent to the sandbox: {error}.") from error

    @classmethod
    def parse(cls, text: str) -> "CodeTask":
        """A task from JSON: {"function": "add", "cases": [[[2, 3], 5], [[0, 0], 0]]}.

        Raises:
            ValueError: it is no such JSON.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"A code task is no JSON ({error}): {text[:60]!r}.") from error
        if not isinstance(found, dict) or set(found) != {"function", "cases"} or not isinstance(found["cases"], list):
            raise ValueError(f'A code task is written {{"function": "add", "cases": [[[2, 3], 5]]}}, and not {text[:60]!r}.')
        return cls(found["function"], tuple(found["cases"]))


def program_of(answer: str) -> str:
    """The program in an answer: its last block between ``` and ```, which may be open at the end; without a block, the whole answer."""
    blocks = BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def passed(outcome: Outcome, task: CodeTask) -> list[bool]:
    """For each case of a task, whether the program returned the expected value."""
    right = [kind == "value" and same(form, found) for (kind, found), form in zip(outcome.results, task.forms, strict=False)]
    return right + [False] * (len(task.cases) - len(right))


def reward_of(outcome: Outcome, task: CodeTask, share: bool) -> float:
    right = passed(outcome, task)
    return sum(right) / len(right) if share else float(all(right) and outcome.ended == "finished")


class CodeReward:
    """1.0 for a program that passes all cases of its task and finishes, else 0.0; or, with `share`, the share of the cases that it passes.

    Its workers start with the first program, or with `describe`, and end with `close`.
    """

    def __init__(self, workers: int = 2, limits: Limits | None = None, namespaces: bool = True):
        self.pool = Pool(limits, workers, namespaces)

    def __call__(self, answer: str, task: CodeTask | str) -> float:
        """The reward of one answer to a task, which may be given as JSON."""
        return self.judge([answer], [task])[0]

    def judge(self, answers: Sequence[str], tasks: Sequence[CodeTask | str], share: bool = False) -> list[float]:
        """The rewards of answers, each to its task; all workers run at once.

        Raises:
            ValueError: a task that is none.
            CourseError: the sandbox does not start on this machine, or does not hold.
        """
        read = [CodeTask.parse(task) if isinstance(task, str) else task for task in tasks]
        calls = [
            Call(program_of(answer), task.function, [inputs for inputs, _ in task.cases])
            for answer, task in zip(answers, read, strict=True)
        ]
        return [reward_of(outcome, task, share) for outcome, task in zip(self.pool.run(calls), read, strict=True)]

    def describe(self) -> str:
        return self.pool.describe()

    def close(self) -> None:
        self.pool.close()
