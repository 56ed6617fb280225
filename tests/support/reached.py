"""Which cases of a build's stages can tell an edited build from the solution: those that run a statement which the edit changed.

A case that runs none of them does what it does with the solution, and that it passes with. So a wrong build is tried on the others alone.
"""

import ast
import os
import sys
import threading
from collections.abc import Iterator
from difflib import SequenceMatcher
from types import CodeType, FrameType
from unittest.mock import patch

from shared.course.build_check import Functions, load
from shared.course.builds import Build
from shared.course.checking import Case, Check, expectation, observe
from shared.course.comparing import differences
from shared.course.stubs import BodyFile


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


class Known:
    """What is known of a build from its solution: what each case expects, and which lines of the solution it runs; None for any."""

    def __init__(self, build: Build, checks: dict[str, Check]):
        self.build, self.checks = build, checks
        self.solution = BodyFile.read(build.solution_file)
        functions = load(self.solution, build.adapters)
        self.expected = {id(case): expectation(case) for check in checks.values() for case in check.cases}
        cases = [(check, case) for check in checks.values() for case in check.cases]
        self.lines = {id(case): lines_of(check, case, functions, str(self.solution.path)) for check, case in cases}

    def rejecting(self, wrong: BodyFile, before: str) -> Iterator[str]:
        """The cases of the stages before one that reject a wrong build, as "stage: title"."""
        changed, functions = changed_lines(self.solution.source, wrong.source), load(wrong, self.build.adapters)
        for name, check in self.checks.items():
            if name == before:
                return
            for case in check.cases:
                if self.can_tell(case, changed):
                    observed, _ = observe(check, case, functions)
                    if differences(self.expected[id(case)], observed, case.rtol, case.atol):
                        yield f"{name}: {case.title}"

    def can_tell(self, case: Case, changed: set[int] | None) -> bool:
        lines = self.lines[id(case)]
        return lines is None or changed is None or not lines.isdisjoint(changed)


def lines_of(check: Check, case: Case, functions: Functions, path: str) -> set[int] | None:
    """The lines of a build that a case runs; None for any where it forks, since nobody sees what the child runs."""
    with Lines(path) as lines, patch.object(os, "fork", wraps=os.fork) as forked:
        observe(check, case, functions)
    return None if forked.called else lines.seen


def changed_lines(before: str, after: str) -> set[int] | None:
    """The lines of a file whose running an edit can change; None for any line.

    That is every line of a statement that differs, and its neighbours, between which one may have been added; of a function whose head,
    local names or indentation differ, all. New functions and imports change nothing by themselves, and what else stands outside of
    functions may change everything.
    """
    old, new = ast.parse(before), ast.parse(after)
    if without_bodies(old) != without_bodies(new):
        return None
    functions, functions_after = dict(functions_of(old)), dict(functions_of(new))
    if functions.keys() - functions_after.keys():
        return None
    changed: set[int] = set()
    lines, lines_after = before.splitlines(), after.splitlines()
    for kind, start, stop, start_after, stop_after in SequenceMatcher(None, lines, lines_after, autojunk=False).get_opcodes():
        if kind != "equal":
            place = set(range(max(start, 1), stop + 2))  # numbers of lines count from 1
            deeper = indents(lines[start:stop]) != indents(lines_after[start_after:stop_after]) and kind == "replace"
            changed |= place.union(*(lines_in(node) for node in functions.values() if deeper and not place.isdisjoint(lines_in(node))))
    for name, node in functions.items():
        if scope(node) != scope(functions_after[name]):
            changed |= lines_in(node)
    return changed.union(*(statement for statement in statements_of(old) if not changed.isdisjoint(statement)))


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
