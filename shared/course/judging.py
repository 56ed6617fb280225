"""Floor 0. Judging answers by a check: the first case that an answer gets wrong, and the known mistake that it shows there.

The first case that differs ends the check. What the answer did there is then looked for among the mutants: an answer that does exactly
what a known wrong answer does gets that mutant's sentence.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch

from shared.course.checking import Case, Check, Observation, describe, expectation, observe
from shared.course.comparing import agree, differences, distance, equal, is_float
from shared.course.report import FAIL, PASS, Outcome

GUESS = "Perhaps: {} (This explains this case, but not all of your results: there may be a second mistake.)"
ALSO = "{} (So it is on most inputs. On some your answer does something else as well.)"
NARROW = "A part of this is computed in float32: float64 inputs come out right to seven or eight digits, and float32 ones as they should."
ENOUGH = 4  # inputs that are got wrong as a mutant gets them, and as many for each on which it is not so, where a sentence is no guess

Mutants = Mapping[str, Callable | tuple[Callable, ...]]  # a sentence -> a wrong answer that shows it, or several ways to write one mistake
Done = tuple[Observation, str | None]  # the results on a case, and what the exception said, if one was raised


def said_by(error: Exception) -> str:
    """What an exception says. The names of temporary folders, of which no two tries have the same, are left out."""
    places = {tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
    return re.sub(rf"({'|'.join(map(re.escape, places))})/[^/'\"\s]+", "a temporary folder", str(error))


class Answer:
    """A function that answers a check, and what it did on the check's cases: it is observed once on each."""

    def __init__(self, check: Check, function: Callable):
        self.check, self.function, self.done = check, function, {}

    def try_on(self, case: Case) -> tuple[Observation, Exception | None]:
        results, error = observe(self.check, case, self.function)
        self.done[id(case)] = results, None if error is None else said_by(error)  # the exception would keep alive all that it saw
        return results, error

    def on(self, case: Case) -> Done:
        if id(case) not in self.done:
            self.try_on(case)
        return self.done[id(case)]


class Judge:
    """Judges answers by one check, each with the sentence of the known mistake that it shows.

    What a case expects and what a mutant does on it is the same whichever answer is judged, so a judge finds it out once.
    """

    def __init__(self, check: Check, mutants: Mutants):
        if not check.cases:
            raise ValueError(f"The check of {check.exercise} has no cases: a check that cannot fail is a defect.")
        self.check, self.expected = check, cache(expectation)
        ways = {said: way if isinstance(way, tuple) else (way,) for said, way in mutants.items()}
        self.mutants = {said: tuple(self.answer(function) for function in functions) for said, functions in ways.items()}

    def answer(self, function: Callable) -> Answer:
        return Answer(self.check, function)

    def judge(
        self, function: Callable, keep: Callable[[Outcome], None] = lambda _: None, confirm: bool = True, explain: bool = True
    ) -> Outcome:
        """Climb the check's cases with `function`.

        Args:
            keep: is given a failed outcome before its diagnosis, in which `function` may never end.
            confirm: see `diagnose`.
            explain: whether a failed outcome is diagnosed.
        """
        began = time.perf_counter()
        answer, outcome = self.answer(function), Outcome(self.check.exercise, PASS, of=len(self.check.cases))
        for case in self.check.cases:
            outcome.cases += 1
            results, error = answer.try_on(case)
            if not agree(self.expected(case), results, case.rtol, case.atol):
                outcome.state, outcome.rung, outcome.title = FAIL, case.rung, case.title
                outcome.problem = describe(case, differences(self.expected(case), results, case.rtol, case.atol), error)
                keep(outcome)
                if explain:
                    said = self.diagnose(case, answer, confirm) or self.not_refused(case, error)
                    outcome.misconception = said or self.narrow(case, answer)
                break
        outcome.seconds = time.perf_counter() - began
        return outcome

    def rejects(self, case: Case, answer: Answer) -> bool:
        return not agree(self.expected(case), answer.on(case)[0], case.rtol, case.atol)

    def diagnose(self, failing: Case, answer: Answer, confirm: bool = True) -> str:
        """The one sentence of which a mutant does what `answer` does, on the failing case and on all that come before it.

        Where mutants of several sentences do, the later cases decide; where they do not either, nothing is said. Where one sentence is
        left and a later case tells its mutants from `answer`, `how_alike` decides how it is said.

        Args:
            confirm: whether one sentence that is left is compared on later cases; for an answer that is a mutant this tells nothing.
        """
        candidates, cases = self.mutants, self.check.cases
        place = cases.index(failing)
        for number, case in enumerate([failing, *cases[:place], *cases[place + 1 :]]):
            if not candidates or number > place and len(candidates) == 1 and not confirm:
                break
            left = {said: tuple(each for each in of if self.same(case, answer, each)) for said, of in candidates.items()}
            alike = {said: of for said, of in left.items() if of}
            if number > place and len(candidates) == 1 and not alike:
                ((said, of),) = candidates.items()
                forms = {self.how_alike(answer, mutant) for mutant in of}
                return (ALSO if ALSO in forms else GUESS).format(said)
            candidates = alike
        return next(iter(candidates)) if len(candidates) == 1 else ""

    def how_alike(self, answer: Answer, mutant: Answer) -> str:
        """The form of a sentence whose mutant differs from `answer` on some case.

        A mistake may look like another one on a few inputs, so it is a guess, unless many cases are got wrong in the very same way: then
        the mistake is there, and another one beside it, or it is written in another way, which shows where numbers are drawn or do not fit.
        """
        alike = [self.same(case, answer, mutant) for case in self.check.cases]
        agreed = sum(same and self.rejects(case, mutant) for same, case in zip(alike, self.check.cases, strict=True))
        return ALSO if agreed >= ENOUGH * max(alike.count(False), 1) else GUESS

    def same(self, case: Case, left: Answer, right: Answer) -> bool:
        """Whether two answers did the same on a case.

        Exceptions are the same where their messages are; where the contract asks to refuse, everyone words it in their own way.
        """
        (results, said), (others, said_there) = left.on(case), right.on(case)
        both_refuse = said is not None and said_there is not None and "raised" in self.expected(case)
        return (both_refuse or said == said_there) and agree(results, others, case.rtol, case.atol)

    def not_refused(self, case: Case, error: Exception | None) -> str:
        """What to say of an answer that breaks, in whichever way, where it is to refuse its arguments."""
        asked = error is not None and self.expected(case).get("raised")
        return f"Refuse with {asked}, before the work begins." if asked == "SettingError" != type(error).__name__ else ""

    def narrow(self, failing: Case, answer: Answer) -> str:
        """What to say of float64 results that have the digits of float32, where float32 ones are right."""

        def few_digits(expected: object, observed: object) -> bool:
            return is_float(expected, torch.float64) and is_float(observed, torch.float64) and 1e-9 <= distance(expected, observed) <= 1e-6

        expected, observed = self.expected(failing), answer.on(failing)[0]
        if expected.keys() != observed.keys():
            return ""
        apart = [name for name in expected if not equal(expected[name], observed[name], failing.rtol, failing.atol)]
        if not all(few_digits(expected[name], observed[name]) for name in apart):
            return ""
        of_float32 = [case for case in self.check.cases if any(is_float(value, torch.float32) for value in self.expected(case).values())]
        return "" if any(self.rejects(case, answer) for case in of_float32) else NARROW


def run_check(
    check: Check, function: Callable, mutants: Mutants, keep: Callable[[Outcome], None] = lambda _: None, confirm: bool = True
) -> Outcome:
    """Judge one answer alone; see `Judge.judge`."""
    return Judge(check, mutants).judge(function, keep, confirm)
