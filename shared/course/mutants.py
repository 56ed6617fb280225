"""Floor 0. Mutants: wrong answers that a learner could plausibly write, as one-place edits of the solutions, with what they mean.

`tests/exercises/mutants/NN.toml` has a table for each, `["05.adamw_update".eps_inside]`: its `edit` is the text to find (once) in the
solution's function and the replacement, and it `says` the sentence of the misconception. One that is too far from the solution for an edit
has a whole `body` in place of it; and one that is `like` another shows its misconception, written in another way, and has its sentence.
"""

import ast
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from shared.course.binding import execute
from shared.course.catalogue import chapter_of
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.stubs import BodyFile


@dataclass(frozen=True)
class Mutant:
    exercise: str
    name: str
    find: str = ""
    replace: str = ""
    sentence: str = ""
    body: str = ""
    like: str = ""  # the name of another mutant of this exercise

    def body_file(self) -> BodyFile:
        """The solutions with this one edit, or this body, under a path of its own."""
        file = BodyFile.read(chapter_of(self.exercise).solution_file)
        text = file.text(self.exercise.split(".", 1)[1])
        if self.body:
            edited = file.source.replace(text, with_body(file.function(self.exercise.split(".", 1)[1]), text, self.body))
            return BodyFile.parsed(Path(f"{file.path}#{self.name}"), edited)
        if (times := text.count(self.find)) != 1:
            raise CourseError(f"Mutant {self.exercise}/{self.name}: its text is {times} times in the solution, not once.")
        edited = file.source.replace(text, text.replace(self.find, self.replace))
        return BodyFile.parsed(Path(f"{file.path}#{self.name}"), edited)

    def function(self) -> Callable:
        """The wrong answer itself, bound to nothing."""
        module = ModuleType(f"course_mutants.{self.exercise}.{self.name}")
        execute(self.body_file(), module)
        return getattr(module, self.exercise.split(".", 1)[1])


def with_body(function: ast.FunctionDef, text: str, body: str) -> str:
    """A function's text with another body under its head."""
    head = text.splitlines()[: function.body[0].lineno - function.lineno]
    return "\n".join([*head, textwrap.indent(body.strip("\n"), "    ")])


@cache
def mutants_in(chapter: str) -> tuple[Mutant, ...]:
    """Every mutant that a chapter ("01") lists."""
    path = CHECKOUT / "tests" / "exercises" / "mutants" / f"{chapter}.toml"
    return read_mutants(path.read_text(encoding="utf-8")) if path.exists() else ()


def read_mutants(text: str) -> tuple[Mutant, ...]:
    """The mutants of a file's text. A name that an exercise has twice is an error of TOML's."""
    entries = [(exercise, name, entry) for exercise, named in tomllib.loads(text).items() for name, entry in named.items()]
    listed = [mutant_of(exercise, name, **entry) for exercise, name, entry in entries]
    said = {(mutant.exercise, mutant.name): mutant.sentence for mutant in listed}
    return tuple(replace(mutant, sentence=said[mutant.exercise, mutant.like]) if mutant.like else mutant for mutant in listed)


def mutant_of(exercise: str, name: str, edit: tuple[str, str] = ("", ""), says: str = "", body: str = "", like: str = "") -> Mutant:
    return Mutant(exercise, name, *edit, says, body, like)


def mutants_of(exercise_id: str) -> tuple[Mutant, ...]:
    return tuple(mutant for mutant in mutants_in(exercise_id.split(".", 1)[0]) if mutant.exercise == exercise_id)


def sentences(exercise_id: str) -> dict[str, tuple[Callable, ...]]:
    """Each sentence and the functions of its mutants, as `run_check` wants them."""
    found: dict[str, tuple[Callable, ...]] = {}
    for mutant in mutants_of(exercise_id):
        found[mutant.sentence] = (*found.get(mutant.sentence, ()), mutant.function())
    return found
