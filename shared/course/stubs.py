"""Floor 0. Stubs: the learner's files, made from the contracts, recognised while untouched, cut into functions.

A stub is its contract's own text (signature, docstring) with one line that raises. The generator is the only author
of `chapters/NN_*/exercises.py`, so a stub cannot drift from its contract.
"""

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

from shared.course.catalogue import Chapter, Contract, Exercise
from shared.course.errors import BrokenFile
from shared.course.paths import shown

HEADER = '''"""Your part of chapter {number}. Write each body in place of its `raise` line, in any order.

    course check {number}          checks what you wrote
    course hint {first}    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""
'''


def stub_of(contract: Contract) -> str:
    """One exercise as the learner finds it."""
    return f'{contract.text}\n    raise NotImplementedError("{contract.exercise}: write this body")\n'


def stub_file(chapter: Chapter) -> str:
    """The whole of `chapters/NN_name/exercises.py`, with the imports that the solutions use."""
    header = HEADER.format(number=chapter.number, first=chapter.exercises[0].id)
    imports = imports_of(chapter.solution_file.read_text(encoding="utf-8"))
    bodies = "\n\n".join(f"# {e.title} ({e.minutes} min, difficulty {e.difficulty} of 5)\n{stub_of(e.contract)}" for e in chapter.exercises)
    return f"{header}\n{imports}\n\n\n{bodies}"


def imports_of(source: str) -> str:
    lines = source.splitlines()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(lines[nodes[0].lineno - 1 : nodes[-1].end_lineno])


def without_docstring(node: ast.FunctionDef) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(node, clean=False) is not None
    return node.body[1:] if has_docstring else node.body


def is_untouched(node: ast.FunctionDef, exercise_id: str) -> bool:
    """Whether a function's body is still the one line that the generator wrote."""
    match without_docstring(node):
        case [ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(said))]))]:
            return said.startswith(f"{exercise_id}:")
    return False


@dataclass(frozen=True)
class BodyFile:
    """A file of bodies, learner's or solution, cut into its functions. Reading it runs nothing of it."""

    path: Path
    source: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> "BodyFile":
        try:
            return cls.parsed(path, path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise BrokenFile(f"{shown(path)} is missing. `course reset {path.parent.name[:2]}` makes a new one.") from None
        except UnicodeDecodeError as error:
            raise BrokenFile(f"{shown(path)} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
        except (SyntaxError, ValueError) as error:
            line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or str(error)
            text = (getattr(error, "text", None) or "").rstrip()
            raise BrokenFile(f"{shown(path)}, line {line}: Python cannot read this file: {reason}\n    {text}") from None

    @classmethod
    def parsed(cls, path: Path, source: str) -> "BodyFile":
        return cls(path, source, ast.parse(source, str(path)))

    @property
    def lines(self) -> list[str]:
        """The source by lines as the syntax tree counts them (`splitlines` would also cut at form feeds)."""
        return self.source.split("\n")

    def function(self, name: str) -> ast.FunctionDef | None:
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        return found[-1] if found else None

    def text(self, name: str) -> str:
        """The source text of a function, as the file has it."""
        node = self.function(name)
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno]) if node else ""

    def attempted(self, exercise: Exercise) -> bool:
        node = self.function(exercise.name)
        return node is not None and not is_untouched(node, exercise.id)

    def fingerprint(self, exercise: Exercise, chapter: Chapter) -> str:
        """Identifies one answer: its function and all that the file defines apart from the other exercises.

        Comments, layout and docstrings do not count, so a pass survives a reformatted file.
        """
        others = {other.name for other in chapter.exercises} - {exercise.name}
        kept = [node for node in self.tree.body if getattr(node, "name", None) not in others]
        bare = [bare_function(node) if isinstance(node, ast.FunctionDef) else ast.dump(node) for node in kept]
        return hashlib.sha256("\n".join(bare).encode()).hexdigest()


def bare_function(node: ast.FunctionDef) -> str:
    """A function's normalised syntax: arguments and statements, without docstring, comments and layout."""
    return ast.dump(node.args) + "".join(ast.dump(statement) for statement in without_docstring(node))
