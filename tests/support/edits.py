"""Every small edit of a solution, made by rule: cosmic-ray's operators, and five of our own that take something away.

cosmic-ray 8.7 replaces operators, comparisons, numbers and constants. The loop of a training step has hardly any of those, so
five rules were added before the first run and not changed after it:

    statement       a statement becomes `pass`
    keyword         a call loses one of its keyword arguments
    call            a call becomes what it was called on, or its first argument
    arguments       two neighbouring positional arguments change places
    name            a local name becomes another local name of the function

Excluded, by a rule that was also fixed beforehand: an edit after which the function has the same syntax tree as before once
annotations and docstrings are taken off, and one that gives the same tree as an earlier one. What is no Python is no edit.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from shared.course.stubs import bare_function, without_docstring


@dataclass(frozen=True)
class Edit:
    """One edit of a solution file.

    operator: the rule that made it.
    function: the function that it changed.
    line: where the file first differs, from 1.
    before, after: that line, without its indentation.
    source: the whole edited file.
    """

    operator: str
    function: str
    line: int
    before: str
    after: str
    source: str


def edits_of(source: str) -> Iterator[Edit]:
    """Every edit of every function in a solution file, each tree once."""
    original = functions_of(source)
    seen = set()
    for operator, edited in [*by_cosmic_ray(source), *by_our_rules(source)]:
        try:
            trees = functions_of(edited)
        except SyntaxError:
            continue
        changed = [name for name, tree in original.items() if trees.get(name) != tree]
        if len(changed) == 1 and trees[changed[0]] not in seen:
            seen.add(trees[changed[0]])
            yield described(operator, changed[0], source, edited)


def functions_of(source: str) -> dict[str, str]:
    """Each function's tree as text, without annotations and docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number is an edit like any other
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    return {node.name: bare_function(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def described(operator: str, function: str, source: str, edited: str) -> Edit:
    before, after = source.split("\n"), edited.split("\n")
    line = next(number for number, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
    return Edit(operator, function, line + 1, before[line].strip(), after[line].strip(), edited)


def by_cosmic_ray(source: str) -> Iterator[tuple[str, str]]:
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():  # these replace names by random numbers; `name` below is ours for that
            continue
        occurrence = 0
        while (edited := mutate_code(source, operator(), occurrence)) is not None:
            yield name.removeprefix("core/"), edited
            occurrence += 1


def by_our_rules(source: str) -> Iterator[tuple[str, str]]:
    text = Text(source)
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
        for statement in without_docstring(function):
            for node in ast.walk(statement):
                yield from ((rule, text.with_replaced(node, new)) for rule, new in replacements(node, names, text))


def replacements(node: ast.AST, names: set[str], text: "Text") -> Iterator[tuple[str, str]]:
    """What may stand in a node's place, with the rule that says so."""
    match node:
        case ast.stmt():
            yield "statement", "pass"
        case ast.Call(func=func, args=args, keywords=keywords):
            parts = [text.of(part) for part in [*args, *keywords]]
            for index in range(len(args), len(parts)):
                yield "keyword", f"{text.of(func)}({', '.join(parts[:index] + parts[index + 1 :])})"
            for index in range(len(args) - 1):
                swapped = parts[:index] + [parts[index + 1], parts[index]] + parts[index + 2 :]
                yield "arguments", f"{text.of(func)}({', '.join(swapped)})"
            if isinstance(func, ast.Attribute):
                yield "call", text.of(func.value)
            elif args:
                yield "call", parts[0]
        case ast.Name(id=name, ctx=ast.Load()) if name in names:
            yield from (("name", other) for other in sorted(names - {name}))


class Text:
    """A source whose nodes can be read and replaced as they are written. The syntax tree counts columns in bytes."""

    def __init__(self, source: str):
        self.lines = source.encode().split(b"\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.bytes = source.encode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def with_replaced(self, node: ast.AST, new: str) -> str:
        start, end = self.span(node)
        return (self.bytes[:start] + new.encode() + self.bytes[end:]).decode()
