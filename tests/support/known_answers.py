"""How a check judges what is known to be right and wrong: the solution, other right answers, the mutants, and spoilt answers.

Imports are few: a child process repeats them for each exercise.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from answer_perturbation import spoilt_answers

from shared.course import binding, catalogue, mutants, running
from shared.course.checking import Case, Check, observe, run_check
from shared.course.checking import expectation as expected_on
from shared.course.comparing import differences
from shared.course.paths import CHECKOUT
from shared.course.stubs import BodyFile

RIGHT_ANSWERS = CHECKOUT / "tests" / "exercises" / "right_answers"


def try_known_answers(exercise_id: str) -> dict:
    """In a fresh process: how the check judges the solution, each mutant and each spoilt answer."""
    torch.set_num_threads(1)
    binding.choose("reference")
    exercise = catalogue.find_exercise(exercise_id)
    solution = getattr(importlib.import_module(exercise.contract.module), exercise.name)
    check = running.read_check(exercise)
    sentences = mutants.sentences(exercise_id)
    wrong = {f"mutant {mutant.name}": mutant.function() for mutant in mutants.mutants_of(exercise_id)}
    spoilt = {f"spoilt {name}": answer for name, answer in spoilt_answers(check, solution).items()}
    right = other_right_answers(exercise)
    return {
        "rungs": [case.rung for case in check.cases],
        "right": {name: run_check(check, answer, {}) for name, answer in right.items()},
        "solution": run_check(check, solution, sentences),
        "wrong": {name: run_check(check, answer, sentences, confirm=False) for name, answer in (wrong | spoilt).items()},
        "idle": [case.title for case in check.cases if not any(fails(check, case, answer) for answer in (wrong | spoilt).values())],
    }


def other_right_answers(exercise: catalogue.Exercise) -> dict[str, Callable]:
    """The functions of tests/exercises/right_answers/NN_name.py that answer an exercise."""
    module = ModuleType("right_answers")
    binding.execute(BodyFile.read(RIGHT_ANSWERS / f"{catalogue.chapter_of(exercise.id).slug}.py"), module)
    return {name: answer for name, answer in vars(module).items() if name.startswith(f"{exercise.name}__")}


def fails(check: Check, case: Case, answer) -> bool:
    return bool(differences(expected_on(case), observe(check, case, answer)[0], case.rtol, case.atol))
