"""What is known of a build: what each case expects, which lines of the solution it runs, and what wrong builds do on it.

A wrong build is the solution with an edit, so most cases run none of the lines that it changes: there it does what the solution does, and
that is what is expected. So it is tried on the others alone, and on each of them once, whichever answers are compared with it.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from unittest.mock import patch

from reached import Lines, Original

from shared.course.assignments import Assignment
from shared.course.build_check import Functions, load, read_checks
from shared.course.checking import Case, Check, Observation, expectation
from shared.course.comparing import agree
from shared.course.judging import Answer, Judge
from shared.course.stubs import BodyFile


class Edited(Functions):
    """The functions of a wrong build, and the lines of the solution that its edit changes; None for any."""

    def __init__(self, build: Assignment, file: BodyFile, changed: set[int] | None):
        super().__init__(load(file, build.adapters).module)
        self.changed = changed


class Traced(Answer):
    """The solution on a stage's cases, and the lines of it that each case runs; None for any."""

    def __init__(self, check: Check, functions: Functions, path: str, expected: Callable[[Case], Observation]):
        super().__init__(check, functions)
        self.path, self.expected, self.lines = path, expected, {}

    def try_on(self, case: Case) -> tuple[Observation, Exception | None]:
        with Lines(self.path) as lines, patch.object(os, "fork", wraps=os.fork) as forked:
            results, error = super().try_on(case)
        self.lines[id(case)] = None if forked.called else lines.seen  # nobody sees what a child runs
        if agree(self.expected(case), results, case.rtol, case.atol):
            return results, error
        return super().try_on(case)  # it may measure time, of which tracing takes some


class Known:
    """What is known of one build, each thing found out once, when it is first asked for."""

    def __init__(self, build: Assignment):
        self.build, self.checks, self.expected = build, read_checks(build.checks), cache(expectation)
        file = BodyFile.read(build.solution_file)
        self.original, self.functions = Original(file.source), load(file, build.adapters)
        self.solution = {name: Traced(check, self.functions, str(file.path), self.expected) for name, check in self.checks.items()}
        self.entries = build.wrong_builds()
        self.stage_judge, self.whole_judge = cache(self.stage_judge), cache(self.whole_judge)

    @cached_property
    def wrong(self) -> dict[str, Edited]:
        """Every wrong build, by its name."""
        files = {name: file for name, (_, file) in self.build.wrong().items()}
        return {name: Edited(self.build, file, self.original.changed_by(file.source)) for name, file in files.items()}

    def again(self, name: str) -> Edited:
        """A wrong build, loaded once more: it is compared with itself too, and must do the same twice."""
        return Edited(self.build, self.build.edited(self.entries[name]), self.wrong[name].changed)

    def stage_judge(self, stage: str) -> Judge:
        """Tries wrong builds where their edits reach, against the candidates of this stage and earlier ones: later ones pass here."""
        names = list(self.checks)
        until = names[: names.index(stage) + 1]
        return Reached(self, stage, {entry.says: self.wrong[name] for name, entry in self.entries.items() if entry.stage in until})

    def whole_judge(self, stage: str) -> Judge:
        """Tries wrong builds on every case, against the candidates of all stages, as the check of a learner's build does."""
        return Knowing(self, stage, {entry.says: self.wrong[name] for name, entry in self.entries.items()})

    def solution_judge(self, stage: str) -> Judge:
        """Judges the solution alone, and notes the lines that cases run."""
        return Tracing(self, stage, {})

    def right_judge(self, stage: str) -> Judge:
        """Compares with no wrong builds, for builds that are right."""
        return Knowing(self, stage, {})

    def can_tell(self, stage: str, case: Case, changed: set[int] | None) -> bool:
        """Whether an edit of these lines can show on a case."""
        solution = self.solution[stage]
        solution.on(case)
        lines = solution.lines[id(case)]
        return lines is None or changed is None or not lines.isdisjoint(changed)

    def rejecting(self, name: str) -> Iterator[str]:
        """The cases of the stages before its own that reject a wrong build, as "stage: title"."""
        for stage, check in self.checks.items():
            if stage == self.entries[name].stage:
                return
            judge = self.stage_judge(stage)
            answer = judge.answer(self.wrong[name])
            yield from (f"{stage}: {case.title}" for case in check.cases if judge.rejects(case, answer))


class Knowing(Judge):
    """A judge of a build's stage, for which it is known what cases expect."""

    def __init__(self, known: Known, stage: str, wrong: dict[str, Edited]):
        self.known, self.stage = known, stage
        super().__init__(known.checks[stage], wrong)
        self.expected = known.expected


class Tracing(Knowing):
    def answer(self, functions: Functions) -> Answer:
        return self.known.solution[self.stage]


class Reached(Knowing):
    """... and which cases an edit reaches: on the others a wrong build does what is expected."""

    def answer(self, functions: Edited) -> Answer:
        return AnswerWhereReached(self, functions)


class AnswerWhereReached(Answer):
    def __init__(self, judge: Reached, functions: Edited):
        super().__init__(judge.check, functions)
        self.judge = judge

    def try_on(self, case: Case) -> tuple[Observation, Exception | None]:
        known = self.judge.known
        if known.can_tell(self.judge.stage, case, self.function.changed):
            return super().try_on(case)
        results = known.expected(case)
        self.done[id(case)] = results, "" if "raised" in results else None
        return results, None
