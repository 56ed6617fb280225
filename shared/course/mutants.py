"""Floor 0. Mutants: wrong answers that a learner could plausibly write, as one-place edits of the solutions, with what they mean.

`tests/exercises/mutants/NN.toml` lists them: the exercise, a name, the text to find (once) in the solution's function, its
replacement, and the sentence of the misconception.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
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
    find: str
    replace: str
    sentence: str

    def body_file(self) -> BodyFile:
        """The solutions with this one edit, under a path of its own."""
        file = BodyFile.read(chapter_of(self.exercise).solution_file)
        text = file.text(self.exercise.split(".", 1)[1])
        if (times := text.count(self.find)) != 1:
            raise CourseError(f"Mutant {self.exercise}/{self.name}: its text is {times} times in the solution, not once.")
        edited = file.source.replace(text, text.replace(self.find, self.replace))
        return BodyFile.parsed(Path(f"{file.path}#{self.name}"), edited)

    def function(self) -> Callable:
        """The wrong answer itself, bound to nothing."""
        module = ModuleType(f"course_mutants.{self.exercise}.{self.name}")
        execute(self.body_file(), module)
        return getattr(module, self.exercise.split(".", 1)[1])


@cache
def mutants_in(chapter: str) -> tuple[Mutant, ...]:
    """Every mutant that a chapter ("01") lists."""
    path = CHECKOUT / "tests" / "exercises" / "mutants" / f"{chapter}.toml"
    if not path.exists():
        return ()
    return tuple(Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"])


def mutants_of(exercise_id: str) -> tuple[Mutant, ...]:
    return tuple(mutant for mutant in mutants_in(exercise_id.split(".", 1)[0]) if mutant.exercise == exercise_id)


def sentences(exercise_id: str) -> dict[str, Callable]:
    """Each mutant's sentence and its function, as `run_check` wants them."""
    return {mutant.sentence: mutant.function() for mutant in mutants_of(exercise_id)}
