"""Floor 0. Notebook helpers, imported by the first cell: set-up, checks, contracts, the core's source, predictions.

Everything prints the same text on every machine and in every run, because notebooks store their outputs and compare them.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.course import binding, catalogue, check_command, figures, running, stubs
from shared.course.errors import CourseError
from shared.course.paths import find_workspace
from shared.course.progress import Progress
from shared.course.report import FAIL, Outcome, outcome_text


class CheckFailed(CourseError):
    """A function that was defined in a cell did not pass its check. Shown as the check's report, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def setup(impl: str = "reference") -> None:
    """Make this notebook's numbers repeatable and its figures the course's, and choose whose exercises the core runs with.

    Args:
        impl: `reference` gives the stored numbers; `mine` or `mixed` runs the notebook on your own exercises.
    """
    import torch

    binding.choose(impl)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # sums in the same order on every machine
    torch.manual_seed(0)
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=100)
    figures.use_style()


def check(exercise_id: str, function: Callable | None = None) -> None:
    """Check your answer in `exercises.py`, or a function defined in a cell, and print what `course check` prints.

    Raises:
        CheckFailed: `function` was given and did not pass.
    """
    exercise = catalogue.find_exercise(exercise_id)
    if function is not None:
        outcome = check_here(exercise, function)
        if outcome.state == FAIL:
            raise CheckFailed(outcome_text(outcome))
    else:
        workspace = find_workspace()
        outcome = next(running.check_files([exercise], workspace))
        check_command.keep(outcome, Progress(workspace))
    print(outcome_text(outcome))


def check_here(exercise: catalogue.Exercise, function: Callable) -> Outcome:
    """Climb a check in this process. A wrong signature is refused as it is in the core."""
    import importlib

    from shared.course import judging, mutants

    contract = getattr(importlib.import_module(exercise.contract.module), exercise.name)
    binding.require_same_signature(contract, function)
    return judging.run_check(running.read_check(exercise), function, mutants.sentences(exercise.id))


def contract(exercise_id: str) -> None:
    """Print what an exercise asks for: signature, shapes, rules, an example. The body is yours."""
    text = stubs.stub_of(catalogue.find_exercise(exercise_id).contract)
    print(text.rsplit("\n    raise NotImplementedError", 1)[0])


def show(part: Any) -> None:
    """Print a function, class or module of the core with its source as it is."""
    print(inspect.getsource(part).rstrip())


@dataclass(frozen=True)
class Prediction:
    """A guess, kept until the fact is measured."""

    question: str
    guess: float | None
    unit: str

    def fact(self, value: float, digits: int = 2) -> None:
        """Print the guess next to what was measured."""
        guessed = "no guess" if self.guess is None else f"your guess {self.guess:.{digits}f}{self.unit}"
        print(f"{self.question}: {guessed}, measured {value:.{digits}f}{self.unit}")


def predict(question: str, guess: float | None = None, unit: str = "") -> Prediction:
    """Ask the reader for a guess before a cell measures; replace `None` by a number and see how close it was."""
    print(f"{question}: {'replace guess=None by yours' if guess is None else f'{guess:g}{unit}'}")
    return Prediction(question, guess, f" {unit}" if unit else "")
