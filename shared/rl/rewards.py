"""Chapter 12. Rewards by name and their weighted sum: verifiers, formats, code, a reward model, and a learner's own functions.

    rewards: [{name: number}, {name: format, weight: 0.2}, {name: my_rewards.brevity, weight: 0.1, options: {words: 20}}]

Each part has its own curve. A reward that raises, gives no finite number or takes too long is named with its prompt and answer, and ends
the run, or counts as a number that was chosen for that: a silent 0 would teach something. One of your own that returns None is not for this
task: the others are added up, and an answer that none applies to has no reward.
"""

import difflib
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError
from shared.course.extensions import ImportPath, called, is_import_path
from shared.finetune.instructions import Task
from shared.preference.rollout import Sample
from shared.preference.rewards import SHOWN, Reward, describe, is_finite, numbers_of
from shared.rl.code_reward import CodeReward
from shared.rl.reward_process import Call, Result, RewardProcess
from shared.rl.verifiers import CODE, REASONED, VERIFIERS

TASK, FORMAT, MODEL = "task", "format", "model"
NAMES = (TASK, FORMAT, MODEL, CODE, *VERIFIERS)


@dataclass(frozen=True)
class RewardPart:
    """One of the rewards that are added up.

    Args:
        name: task for each task's own check; number, exact, math, code, json or python for all tasks; format; model; or a function of your
            own by import path, such as my_module.my_reward, which is called with a prompt, an answer and the expected answer, and returns
            a number, or None for a task that it is not for.
        weight: what it is multiplied by.
        pattern: with format, the regular expression that a whole answer must match; null for thoughts and answer in tags.
        folder: with model, of a run with mode reward, or of transformers' sequence classification.
        options: with a function of your own, its keyword arguments.
        share: with code, count the share of a task's cases that a program passes, in place of all or nothing.
    """

    name: ImportPath = TASK
    weight: float = 1.0
    pattern: str | None = None
    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    share: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES and not is_import_path(self.name):
            near = difflib.get_close_matches(self.name, NAMES, n=1)
            raise ValueError(
                f"rewards names {self.name!r}: choose {', '.join(NAMES)}, or a function of your own by import path, such as "
                f"my_module.my_reward.{f' Did you mean {near[0]!r}?' if near else ''}"
            )
        if self.options and self.name in NAMES:
            raise ValueError(f"The reward {self.name} has options: give them to a function by import path, and to no other.")
        if not math.isfinite(self.weight) or self.weight == 0:
            raise ValueError(f"The weight of the reward {self.name} is {self.weight}: give a number other than 0, or leave the reward out.")
        if (self.folder is not None) != (self.name == MODEL):
            raise ValueError(f"The reward {self.name} has the folder {self.folder}: give one to the reward model, and to no other.")
        if self.pattern is not None and self.name != FORMAT:
            raise ValueError(f"The reward {self.name} has a pattern: give one to the reward format, and to no other.")
        if self.share and self.name != CODE:
            raise ValueError(f"The reward {self.name} has share: give it to the reward code, and to no other.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"The pattern {self.pattern!r} is no regular expression ({error}): mend it.") from None


class RewardSet:
    """The weighted sum of some rewards, as `RolloutLoader` calls it.

    Args:
        parts: one or more, each name once.
        tasks: by the numbers of the prompts.
        decode: the ids of an answer, without the token that ended it, to text.
        model: with the part model, its scores.
        code: with the part or check code, what runs answers, under limits of its own.
        seconds: that a reward of one answer may take.
        failed: what a reward counts as that failed; None to end the run.

    Attributes:
        parts: for each answer of the last call, name without module -> reward without weight, of those that apply; and with a number for
            `failed`, whether one failed.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        tasks: Sequence[Task],
        decode: Callable[[list[int]], str],
        model: Reward | None = None,
        code: CodeReward | None = None,
        seconds: float = 5.0,
        failed: float | None = None,
    ):
        self.weights = {part.name: part.weight for part in parts}
        self.share = any(part.share for part in parts)
        if not parts or len({*map(called, self.weights)}) < len(parts):
            raise CourseError(f"rewards names {', '.join(part.name for part in parts) or 'nothing'}: give at least one, and each once.")
        self.tasks, self.decode, self.model, self.code, self.failed = tasks, decode, model, code, failed
        mine = {part.name: part.options for part in parts if is_import_path(part.name)}
        formats = {part.name: part.pattern or REASONED for part in parts if part.name == FORMAT}
        checks = {*self.weights} | ({task.check for task in tasks} if TASK in self.weights else set())
        if CODE in checks and code is None or MODEL in checks and model is None:
            raise ValueError("The rewards need what runs code, or a reward model, and were given none.")
        self.own = RewardProcess(formats | mine, seconds)  # apart: what hangs most often starts anew the soonest
        self.verifiers = RewardProcess(dict.fromkeys(sorted(checks & VERIFIERS.keys())), seconds)
        self.parts: list[dict[str, float]] = []
        self.warned: set[str] = set()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        answers = [self.decode(each.completion.said) for each in samples]
        tasks = [self.tasks[each.prompt] for each in samples]
        columns, failures = {}, [0.0] * len(samples)
        for name in self.weights:
            if name == MODEL:
                columns[name], failed = self.counted(numbers_of(self.model, samples), tasks, answers, name)
            else:
                columns[name], failed = self.judged(tasks, answers, name)
            failures = [*map(max, failures, failed)]
        if self.failed is not None:
            columns["failed"] = failures
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
        self.parts = [{called(name): value for name, value in row.items()} for row in rows]
        applying = [[weight * row[name] for name, weight in self.weights.items() if name in row] for row in rows]
        return [sum(each) if each else None for each in applying]

    def judged(self, tasks: Sequence[Task], answers: Sequence[str], name: str = TASK) -> tuple[list[float | None], list[float]]:
        """One reward of answers to any tasks, None where it is not for one; and 1.0 for each that failed and counts as `failed`.

        Raises:
            CourseError: it failed, and nothing was chosen.
        """
        found: list[Result] = [None] * len(answers)
        calls: dict[int, Call] = {}
        programs: dict[int, tuple[str, str]] = {}
        for place, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            of = task.check if name == TASK else name
            if of == CODE:
                programs[place] = (answer, task.answer)
            else:
                calls[place] = (of, task.prompt, answer, task.answer)
        process = self.own if name in self.own.functions else self.verifiers
        values = process([*calls.values()], reason_against) if self.failed is None else process([*calls.values()])
        if len(values) == len(calls):
            values += self.run([*programs.values()], self.share and name == CODE)
        for place, value in zip([*calls, *programs], values, strict=False):  # a failure that ends the run is the last of fewer
            found[place] = value
        return self.counted(found, tasks, answers, name)

    def counted(
        self, found: Sequence[Result], tasks: Sequence[Task], answers: Sequence[str], name: str
    ) -> tuple[list[float | None], list[float]]:
        """The rewards, with `failed` in place of invalid ones, and 1.0 for each of those.

        Args:
            found: numbers, None where a reward does not apply, and words where it failed.
        """
        reasons = [reason_against(each) for each in found]
        for reason, task, answer in zip(reasons, tasks, answers, strict=True):
            if reason:
                where = f"the prompt {task.prompt[:SHOWN]!r} and the answer {answer[:SHOWN]!r}"
                self.report(f"The reward {name} failed on {where}: {reason}.", name)
        values = [self.failed if reason else value for value, reason in zip(found, reasons, strict=True)]
        return values, [float(bool(reason)) for reason in reasons]

    def run(self, programs: Sequence[tuple[str, str]], share: bool) -> list[Result]:
        """Rewards of programs, in one batch; one by one if a task is invalid, to name it."""
        if not programs:
            return []
        try:
            return [*self.code.judge(*zip(*programs, strict=True), share)]
        except ValueError as error:
            return [describe(error)] if len(programs) == 1 else [value for each in programs for value in self.run([each], share)]

    def report(self, said: str, name: str) -> None:
        """Report a failed reward: as an error, or once as a warning."""
        if self.failed is None:
            raise CourseError(f"{said} Mend it, or say with reward_failed what such an answer counts as.")
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(f"{said} It counts as {self.failed}, and so do later ones.", stacklevel=2)

    def close(self) -> None:
        self.own.close()
        self.verifiers.close()


def reason_against(value: Result) -> str:
    """Why a value is no valid reward; empty if it is one, or None."""
    if value is None or isinstance(value, str):
        return value or ""
    return "" if is_finite(value) else f"it gave {value}, and a finite number is needed (in float32)"
