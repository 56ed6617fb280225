"""Floor 0. Checks of builds and repairs: a learner's whole file, observed through its functions, in a child process with limits.

A stage is a `Check` whose cases get the file's functions in place of one function. A function that still raises NotImplementedError
makes its stage NOT ATTEMPTED. A run script uses a build whose stages all passed on its present text; it asks after `launch`, which has
chosen the implementation:

    build = passed_build("01")
    print(build_line("01"))
    if build is not None:
        model = build.new_model(...)
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.course import binding, running
from shared.course.assignments import Assignment, Stage, find_build, fingerprint
from shared.course.errors import BrokenFile, CourseError
from shared.course.paths import shown
from shared.course.progress import Progress
from shared.course.report import NOT_ATTEMPTED, Outcome, count
from shared.course.stubs import BodyFile

RAISED = "raised    "  # begins the line of an error (`checking.describe`)
SECONDS = 60.0  # of the processor's time, for one stage


class Functions:
    """The public functions of a learner's file. `missing` is what the first one said that raised NotImplementedError, and `returned` what
    the last call gave, in words: its result is not kept, because a check may count what is still in memory."""

    def __init__(self, module: ModuleType):
        self.module, self.missing, self.returned = module, "", ""

    def __getattr__(self, name: str) -> Callable:
        function = getattr(self.module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.returned = ""
            try:
                result = function(*arguments, **named)
            except NotImplementedError as error:
                self.missing = self.missing or str(error) or f"{name} raises NotImplementedError"
                raise
            self.returned = f"{name} returned {'None' if result is None else f'an object of type {type(result).__name__}'}"
            return result

        return call


def check_build(build: Assignment, stages: tuple[Stage, ...], file: BodyFile) -> Iterator[Outcome]:
    """Check a build or a repair, one outcome per stage, each in a child process."""
    for stage in stages:
        if refused := forbidden_import(file, build):
            outcome = running.failed(stage, refused)
        elif not build.attempted(file):
            outcome = Outcome(stage.id, NOT_ATTEMPTED, problem=[f"Nothing is written yet in {shown(file.path)}."])
        else:
            outcome = running.run_apart(stage, file, SECONDS, work=partial(check_stage, build))
        outcome.fingerprint = fingerprint(file)
        yield outcome


def forbidden_import(file: BodyFile, build: Assignment) -> str:
    """A sentence where a build imports what it is to build, or reads its solution; else nothing."""
    if line := running.solution_mentioned(file):
        return f"{shown(file.path)}, line {line}: this reads the solution. Write your own."
    for node in ast.walk(file.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            if any(f"{name}.".startswith(f"{module}.") for module in build.forbidden):
                return f"{shown(file.path)}, line {node.lineno}: {name} is what this build is to write. Write your own."
    return ""


def check_stage(build: Assignment, stage_id: str, file: BodyFile, seconds: float, waiting: float, keep: Callable) -> Outcome:
    """The work of the child process: load the file, climb the stage's cases."""
    import torch

    from shared.course.judging import Judge

    torch.set_num_threads(1)
    stage = next(stage for stage in build.stages if stage.id == stage_id)
    try:
        binding.choose("reference")
        check = read_checks(build.checks)[stage.name]
        functions = load(file, build.adapters)
        running.limit(seconds, waiting)  # from here on the time is the answer's
        judge = Judge(check, {sentence: load(wrong, ()) for sentence, wrong in build.wrong().values()})
        outcome = run_stage(judge, functions, keep)
    except CourseError as error:
        return running.failed(stage, str(error))
    used = [module for module in build.forbidden if module in sys.modules and module.startswith("shared.")]  # torch imports parts of itself
    return running.failed(stage, f"Your code imported {used[0]}, which is what this build is to write.") if used else outcome


def load(file: BodyFile, names: tuple[str, ...]) -> Functions:
    """Execute a learner's file.

    Raises:
        BrokenFile: its top level raises, or one of `names` is not a plain function of the file.
    """
    module = ModuleType(f"course_{Path(file.path).stem}_{file.path.name.partition('#')[2]}")
    binding.execute(file, module)
    for name in names:
        if not hasattr(module, name):
            raise BrokenFile(f"{shown(file.path)} has no function {name!r}, which the check calls: put it back.")
        binding.require_own_code(getattr(module, name), name, file.path)
    return Functions(module)


def read_checks(path: Path) -> dict[str, Any]:
    """The checks that a file defines in `STAGES`, by name."""
    return read_module(path).STAGES


def read_module(path: Path) -> ModuleType:
    """Execute a file of a build's folder. It may import modules of its folder, and of the folder above, which builds share: `from .pieces
    import ...`, `from .common import ...`."""
    package = ModuleType(f"course_stages_{path.parent.name}")
    package.__path__ = [str(path.parent), str(path.parent.parent)]
    sys.modules[package.__name__] = package
    module = ModuleType(f"{package.__name__}.{path.stem}")
    binding.execute(BodyFile.read(path), module)
    return module


def run_stage(judge: "Judge", functions: Functions, keep: Callable = lambda _: None, confirm: bool = True) -> Outcome:
    """Climb a stage's cases in this process. The mutants of its judge are wrong builds; see `Judge.judge`."""
    missing: list[str] = []

    def before_diagnosis(outcome: Outcome) -> None:
        missing.append(functions.missing)  # now: later cases of a wrong build may meet a function that is not written yet
        raised = [place for place, line in enumerate(outcome.problem) if line.startswith(RAISED)]
        if raised and functions.returned:
            outcome.problem.insert(raised[-1] + 1, f"          in the check, after your {functions.returned}")
        if not functions.missing:
            keep(outcome)

    outcome = judge.judge(functions, before_diagnosis, confirm)
    if any(missing):
        return Outcome(judge.check.exercise, NOT_ATTEMPTED, problem=missing)
    return outcome


def passed_build(number: str) -> Functions | None:
    """The functions of a chapter's build, where the run uses the learner's parts and all stages passed on this very text; else None.

    Args:
        number: the chapter, as in "01".

    Raises:
        BrokenFile: the file's top level raises, though its stages passed.
    """
    build, file, passed = build_of_run(number)
    if file is None or len(passed) < len(build.stages):
        return None
    return load(file, build.adapters)


def build_line(number: str) -> str:
    """One line for a run's header: whether the learner's build runs, and if not, why."""
    build, file, passed = build_of_run(number)
    if binding.current_choice().implementation == "reference":
        return f"{build.id} is not asked for: run with IMPL=mine (`--impl mine`) to use yours."
    if file is None or not build.attempted(file):
        return f"{build.id} is not written yet: this runs without it."
    if len(passed) < len(build.stages):
        done = f"{len(passed)} of {count(len(build.stages), 'stage')} passed on the present text of {shown(file.path)}"
        return f"{build.id} is not used: {done}. `course check {build.id}` checks the others."
    return f"{build.id} runs: {shown(file.path)}, all {count(len(build.stages), 'stage')} passed."


def unused_line(number: str, why: str) -> str:
    """One line for the header of a run that has no place for its chapter's build, whether or not it passed."""
    return f"{number}.build is not used by this run: {why}"


def build_of_run(number: str) -> tuple[Assignment, BodyFile | None, list[str]]:
    """The build, the learner's file where the run may use it and Python can read it, and the stages that passed on its text."""
    build, _ = find_build(f"{number}.build")
    choice = binding.current_choice()
    if choice.implementation == "reference":
        return build, None, []
    try:
        file = BodyFile.read(build.file(choice.workspace))
    except BrokenFile:
        return build, None, []
    record, text = Progress(choice.workspace).read(), fingerprint(file)
    return build, file, [stage.name for stage in build.stages if record.get(stage.id, {}).get("passed") == text]
