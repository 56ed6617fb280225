"""How a check judges what is known to be right and wrong: the solution, other right answers, the mutants, and spoilt answers.

Imports are few: a child process repeats them for each exercise.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from answer_perturbation import spoilt_answers

from shared.course import binding, catalogue, mutants, running
from shared.course.checking import Case
from shared.course.judging import Judge
from shared.course.paths import CHECKOUT
from shared.course.report import FAIL, Outcome
from shared.course.stubs import BodyFile

RIGHT_ANSWERS = CHECKOUT / "tests" / "exercises" / "right_answers"


def try_known_answers(exercise_id: str) -> dict:
    """In a fresh process: how the check judges the solution, each mutant and each spoilt answer."""
    torch.set_num_threads(1)
    binding.choose("reference")
    exercise = catalogue.find_exercise(exercise_id)
    solution = getattr(importlib.import_module(exercise.contract.module), exercise.name)
    check = running.read_check(exercise)
    judge = Judge(check, mutants.sentences(exercise_id))
    wrong = {f"mutant {mutant.name}": mutant.function() for mutant in mutants.mutants_of(exercise_id)}
    spoilt = {f"spoilt {name}": answer for name, answer in spoilt_answers(check, solution).items()}
    right = other_right_answers(exercise)
    verdicts = {name: judge.judge(answer, confirm=False) for name, answer in wrong.items()}
    verdicts |= {name: judge.judge(answer, explain=False) for name, answer in spoilt.items()}  # no learner reads what is said of these
    return {
        "rungs": [case.rung for case in check.cases],
        "right": {name: judge.judge(answer, explain=False) for name, answer in right.items()},
        "solution": judge.judge(solution),
        "wrong": verdicts,
        "idle": [case.title for case in idle(judge, verdicts, spoilt)],
    }


def idle(judge: Judge, verdicts: dict[str, Outcome], spoilt: dict[str, Callable]) -> list[Case]:
    """The cases that no wrong answer fails. Where a check ended it has rejected one; on the others all are tried."""
    rejecting = {outcome.cases - 1 for outcome in verdicts.values() if outcome.state == FAIL}
    left = [case for place, case in enumerate(judge.check.cases) if place not in rejecting]
    known = [mutant for alike in judge.mutants.values() for mutant in alike]
    others = [judge.answer(answer) for answer in spoilt.values()]
    return [case for case in left if not any(judge.rejects(case, answer) for answer in (known + others))]


def other_right_answers(exercise: catalogue.Exercise) -> dict[str, Callable]:
    """The functions of tests/exercises/right_answers/NN_name.py that answer an exercise."""
    module = ModuleType("right_answers")
    binding.execute(BodyFile.read(RIGHT_ANSWERS / f"{catalogue.chapter_of(exercise.id).slug}.py"), module)
    return {name: answer for name, answer in vars(module).items() if name.startswith(f"{exercise.name}__")}
