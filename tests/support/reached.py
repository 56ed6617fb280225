"""Which cases of a build's stages can tell an edited build from the solution: those that run a statement which the edit changed.

A case that runs none of them does what it does with the solution, and that it passes with. So a wrong build is tried on the others alone.
"""

import ast
import sys
import threading
from collections.abc import Iterator
from difflib import SequenceMatcher
from types import CodeType, FrameType


class Lines:
    """Notes the lines of a file that run, in every thread of this process."""

    def __init__(self, path: str):
        self.path, self.seen = path, set()

    def __enter__(self) -> "Lines":
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def trace(self, frame: FrameType, event: str, _: object):
        if frame.f_code.co_filename != self.path:
            return None
        self.seen.add(frame.f_lineno)
        return self.trace


class Original:
    """A source, and which of its lines an edit can change."""

    def __init__(self, source: str):
        tree = ast.parse(source)
        self.lines = source.splitlines()
        self.outside, self.functions, self.statements = without_bodies(tree), dict(functions_of(tree)), list(statements_of(tree))

    def changed_by(self, after: str) -> set[int] | None:
        """The lines of this source whose running an edit can change; None for any line.

        That is every line of a statement that differs, and its neighbours, between which one may have been added; of a function whose
        head, local names or indentation differ, all. New functions and imports change nothing by themselves, and what else stands outside
        of functions may change everything.
        """
        tree, lines_after = ast.parse(after), after.splitlines()
        functions_after = dict(functions_of(tree))
        if self.outside != without_bodies(tree) or self.functions.keys() - functions_after.keys():
            return None
        changed: set[int] = set()
        for kind, start, stop, start_after, stop_after in SequenceMatcher(None, self.lines, lines_after, autojunk=False).get_opcodes():
            if kind != "equal":
                place = set(range(max(start, 1), stop + 2))  # numbers of lines count from 1
                deeper = indents(self.lines[start:stop]) != indents(lines_after[start_after:stop_after]) and kind == "replace"
                own = self.functions.values()
                changed |= place.union(*(lines_in(node) for node in own if deeper and not place.isdisjoint(lines_in(node))))
        for name, node in self.functions.items():
            if text(self.lines, node) != text(lines_after, functions_after[name]) and scope(node) != scope(functions_after[name]):
                changed |= lines_in(node)
        return changed.union(*(statement for statement in self.statements if not changed.isdisjoint(statement)))


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by name."""
    for node in tree.body:
        for inner in [node] if isinstance(node, ast.FunctionDef) else node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(inner, ast.FunctionDef):
                yield (inner.name if inner is node else f"{node.name}.{inner.name}"), inner


def without_bodies(tree: ast.Module) -> list[str]:
    """What a module says outside of functions' bodies, without its imports. In a class a new function counts: it may replace another."""
    said = []
    for node in tree.body:
        match node:
            case ast.ClassDef():
                said += [ast.dump(part) for part in [*node.bases, *node.keywords, *node.decorator_list]]
                said += [inner.name if isinstance(inner, ast.FunctionDef) else ast.dump(inner) for inner in [*node.body]]
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef():
                pass
            case _:
                said.append(ast.dump(node))
    return said


def lines_in(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def text(lines: list[str], function: ast.FunctionDef) -> list[str]:
    """A function's own lines, with its decorators."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return lines[first - 1 : function.end_lineno]


def indents(lines: list[str]) -> list[int]:
    return sorted({len(line) - len(line.lstrip()) for line in lines if line.strip()})


def scope(function: ast.FunctionDef) -> list:
    """A function's head, and which names are its own: they hold for all of its lines, also for those that do not run."""
    found: list = [ast.dump(function.args), *(ast.dump(decorator) for decorator in function.decorator_list)]

    def look(code: CodeType) -> None:
        found.append((code.co_name, code.co_flags, code.co_freevars, sorted(code.co_cellvars), sorted(code.co_varnames)))
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                look(inner)

    look(compile(ast.Module([function], []), "solution", "exec"))
    return found


def statements_of(tree: ast.Module) -> Iterator[set[int]]:
    """The lines of each simple statement, and of each compound one's head."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            yield set(range(node.lineno, body[0].lineno if body and body[0].lineno > node.lineno else node.end_lineno + 1))
