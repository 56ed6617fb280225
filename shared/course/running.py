"""Floor 0. Running checks in child processes, with limits on time, memory and output.

Children are forked from a server that has imported torch and nothing else, so a check costs milliseconds beyond its own
work, and a learner's endless loop, crash or flood of prints ends that check only.
"""

import ast
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil

from shared.course.binding import execute
from shared.course.catalogue import Exercise, chapter_of
from shared.course.errors import BrokenFile, CourseError
from shared.course.paths import CHECKOUT, shown
from shared.course.report import FAIL, NOT_ATTEMPTED, Outcome
from shared.course.stubs import BodyFile

MEMORY_LIMIT = 4 * 2**30  # bytes resident in a child
OUTPUT_LIMIT = 16 * 2**20  # bytes printed by a child
STARTING = 120.0  # seconds that a child may take, on a loaded machine, until its check begins
WAITING = 40.0  # seconds beyond its limit that an answer may spend waiting; the limit itself counts only processor time
DIAGNOSING = 20.0  # seconds for finding out which misconception a failed answer shows; a build has more than a hundred wrong ones
SHOWN_OUTPUT = 2000  # characters of it that are shown
PRELOADED = ["shared.course.preloaded"]


def check_files(exercises: Iterable[Exercise], workspace: Path) -> Iterator[Outcome]:
    """Check the learner's answers in `workspace`, one outcome per exercise."""
    for exercise in exercises:
        chapter = chapter_of(exercise.id)
        try:
            file = BodyFile.read(chapter.stub_file(workspace))
            outcome = check_file(exercise, file) if file.attempted(exercise) else not_attempted(exercise, file)
            outcome.fingerprint = file.fingerprint(exercise, chapter)  # of the text that was checked, whatever was saved since
        except BrokenFile as error:
            outcome = failed(exercise, str(error))
        yield outcome


def check_solutions(exercises: Iterable[Exercise]) -> Iterator[Outcome]:
    """Check the course's own solutions."""
    for exercise in exercises:
        yield check_file(exercise, BodyFile.read(chapter_of(exercise.id).solution_file))


def check_file(exercise: Exercise, file: BodyFile) -> Outcome:
    """Check the answer to `exercise` in `file`, in a child process."""
    if peeked := solution_mentioned(file):
        reads = f"{shown(file.path)}, line {peeked}: this reads the solution."
        return failed(exercise, f"{reads} Write your own; `course solution` opens it after a pass or the third hint.")
    return run_apart(exercise, file, seconds=time_limit(exercise))


def not_attempted(exercise: Exercise, file: BodyFile) -> Outcome:
    outcome = Outcome(exercise.id, NOT_ATTEMPTED)
    if file.function(exercise.name) is None:
        outcome.problem = [f"{shown(file.path)} has no function {exercise.name}. `course reset {exercise.id}` brings it back."]
    return outcome


def failed(exercise: Exercise, reason: str, printed: str = "") -> Outcome:
    return Outcome(exercise.id, FAIL, problem=reason.splitlines(), printed=printed)


def solution_mentioned(file: BodyFile) -> int | None:
    """The line of a learner's file that imports or names the solutions, where one does."""
    if file.path.is_relative_to(CHECKOUT / "solutions"):
        return None
    for node in ast.walk(file.tree):
        match node:
            case ast.Import(names=names) if any(alias.name.split(".")[0] == "solutions" for alias in names):
                return node.lineno
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "solutions":
                return node.lineno
            case ast.Call(args=given) if any(isinstance(word, ast.Constant) and names_solutions(word.value) for word in given):
                return node.lineno
    return None


def names_solutions(value: object) -> bool:
    """Whether a value of a learner's file is a path or module of the solutions."""
    return isinstance(value, str) and "solutions" in re.split(r"[./\\]", value)


def check_path(exercise: Exercise) -> Path:
    path = CHECKOUT / "tests" / "exercises" / "checks" / chapter_of(exercise.id).slug / f"{exercise.name}.py"
    if not path.exists():
        raise CourseError(
            f"{shown(path)} is missing: {exercise.id} cannot be checked. `git checkout tests/exercises/checks` brings it back."
        )
    return path


def time_limit(exercise: Exercise) -> float:
    """Seconds that a check may compute, read from its file without running it."""
    found = re.search(r"^\s*seconds=(\d+(?:\.\d+)?)", check_path(exercise).read_text(encoding="utf-8"), re.M)
    return float(found[1]) if found else 20.0


def run_apart(exercise: Exercise, file: BodyFile, seconds: float, waiting: float = WAITING, work: Callable | None = None) -> Outcome:
    """One check in a child of the fork server, watched until it ends or passes a limit.

    Args:
        exercise: what is checked, of which only the id is used; also a build's stage.
        seconds: of the processor's time, so that no answer fails because the machine is busy with something else.
        waiting: seconds by the clock beyond these, for an answer that never stops waiting.
        work: work(id, file, seconds, waiting, keep) -> Outcome, run in the child; default: the check of an exercise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="course-check-") as folder:
        result, output = Path(folder, "result.json"), Path(folder, "output.txt")
        output.touch()
        child = context.Process(target=child_main, args=(exercise.id, file, folder, seconds, waiting, work), daemon=True)
        with without_main_module():
            child.start()
        try:
            over = watch(child, output, seconds, waiting)
        finally:
            child.kill()  # without effect on one that has ended; Ctrl-C must leave none behind
            child.join()
        printed = clipped(output)
        if over and not result.exists():
            return failed(exercise, f"{over}{stuck_at(Path(folder, 'stuck.txt'), file)}", printed)
        if not result.exists():
            return failed(exercise, f"Your code ended the process (exit code {child.exitcode}) before the check was through.", printed)
        return Outcome(**json.loads(result.read_text(encoding="utf-8")) | {"printed": printed})


@contextmanager
def without_main_module() -> Iterator[None]:
    """Start a child that does not run this program's main module, as multiprocessing has children do: all commands of `course` would be
    imported again for each check, or Jupyter's kernel."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def watch(child: multiprocessing.Process, output: Path, seconds: float, waiting: float) -> str:
    """Wait for a child until it ends or passes a limit. Returns which one, or nothing."""
    deadline, over = time.monotonic() + STARTING + seconds + waiting + 5.0, ""  # the child's own alarm comes first
    too_slow = f"Your code did not finish within {seconds:g} s."
    while child.exitcode is None and not over:
        child.join(0.02)
        try:
            resident = psutil.Process(child.pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
        if time.monotonic() > deadline:
            over = too_slow
        elif resident > MEMORY_LIMIT:
            over = f"Your code used more than {MEMORY_LIMIT / 2**30:.0f} GiB of memory."
        elif output.stat().st_size > OUTPUT_LIMIT:
            over = f"Your code printed more than {OUTPUT_LIMIT // 2**20} MiB."
    return too_slow if child.exitcode in (-signal.SIGPROF, -signal.SIGALRM) else over


def clipped(output: Path) -> str:
    with open(output, encoding="utf-8", errors="replace") as file:
        text = file.read(SHOWN_OUTPUT + 1)
    size = output.stat().st_size
    return text if len(text) <= SHOWN_OUTPUT else f"{text[:SHOWN_OUTPUT]}\n... ({size:,} bytes printed in all)"


def stuck_at(trace: Path, file: BodyFile) -> str:
    """Where the learner's code was when time ran out, from the child's own trace."""
    text = trace.read_text(encoding="utf-8", errors="replace") if trace.exists() else ""
    found = re.search(rf'File "{re.escape(str(file.path))}", line (\d+)', text)
    return f" It was at line {found[1]}: {file.source.splitlines()[int(found[1]) - 1].strip()}" if found else ""


def child_main(
    exercise_id: str, file: BodyFile, folder: str, seconds: float, waiting: float = WAITING, work: Callable | None = None
) -> None:
    """The child: bind the answer into the core, climb the check, leave the outcome as JSON."""
    redirect(Path(folder, "output.txt"))
    threading.Thread(target=end_with_parent, daemon=True).start()
    # By a signal, so that a thread writes down its own frames: another one that read them could meet one half made. Then the signal's own
    # way, which ends the process: so the parent sees the trace whole or not at all.
    trace = open(Path(folder, "stuck.txt"), "w")
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(number, file=trace, all_threads=False, chain=True)
    limit(max(20.0, seconds), STARTING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills this process
    try:
        outcome = (work or check_in_this_process)(exercise_id, file, seconds, waiting, partial(keep_before_diagnosis, folder=Path(folder)))
    except Exception as error:  # what the answer raises is caught where it is called
        traceback.print_exc()
        outcome = failed_check(exercise_id, error)
    leave(outcome, Path(folder))


def leave(outcome: Outcome, folder: Path) -> None:
    """Leave an outcome for the parent, whole or not at all. Another one may follow and replace it."""
    unfinished = folder / "result.part"
    unfinished.write_text(json.dumps(outcome.to_json()), encoding="utf-8")
    unfinished.replace(folder / "result.json")


def keep_before_diagnosis(outcome: Outcome, folder: Path) -> None:
    """Leave a failed outcome for the parent before it is known why: there an answer that fails may hang on later cases."""
    leave(outcome, folder)
    limit(DIAGNOSING, waiting=4.0)


def failed_check(exercise_id: str, error: Exception) -> Outcome:
    reason = f"The check itself failed ({type(error).__name__}: {error}). That is a fault of the course and says nothing about your answer."
    return Outcome(exercise_id, FAIL, problem=[*reason.splitlines(), "`course doctor` says whether a file of the course was changed."])


def end_with_parent() -> None:
    """A parent that was killed cannot kill its child: the child watches for it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def redirect(output: Path) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="replace")


def limit(computing: float, waiting: float) -> None:
    """End this process after so many seconds more of the processor's time, or by the clock after these and `waiting` more."""
    signal.setitimer(signal.ITIMER_PROF, computing)
    signal.setitimer(signal.ITIMER_REAL, computing + waiting)


def check_in_this_process(exercise_id: str, file: BodyFile, seconds: float, waiting: float, keep: Callable) -> Outcome:
    """Bind the answer in `file` into the core of this process, which must be fresh, and climb its check."""
    import torch

    from shared.course import binding, catalogue, judging, mutants

    torch.set_num_threads(1)
    exercise = catalogue.find_exercise(exercise_id)
    try:
        binding.choose("reference", replaced={exercise_id: file})
        core = importlib.import_module(exercise.contract.module)
        check = read_check(exercise)
        limit(seconds, waiting)  # from here on the time is the answer's
        return judging.run_check(check, getattr(core, exercise.name), mutants.sentences(exercise_id), keep)
    except CourseError as error:
        return failed(exercise, str(error))


def read_check(exercise: Exercise) -> "Check":
    """The `CHECK` that a check file defines. The file may import modules of its folder, and of the folder above, which chapters share:
    `from .pieces import ...`, `from .common import ...`."""
    path = check_path(exercise)
    package = ModuleType(f"course_checks_{exercise.chapter}")
    package.__path__ = [str(path.parent), str(path.parent.parent)]
    sys.modules[package.__name__] = package
    module = ModuleType(f"{package.__name__}.{exercise.name}")
    execute(BodyFile.read(path), module)
    return module.CHECK
