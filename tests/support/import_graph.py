"""The import graph of the core, read from its sources: which module imports which, and where imports run in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

from shared.course import catalogue
from shared.course.paths import CHECKOUT


def import_statements(tree: ast.AST, annotations: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, those inside functions too. annotations: also those under `if TYPE_CHECKING`, which serve annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif annotations or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from import_statements(node, annotations)


def imported(path: Path, modules: set[str], annotations: bool = False) -> set[str]:
    """Which of `modules` the file at `path` imports. Importing a package's submodule does not count as importing the package."""
    found = set()
    for node in import_statements(ast.parse(path.read_text(encoding="utf-8")), annotations):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules if submodules <= modules else (submodules & modules) | {node.module}
    return found & modules


def import_graph(annotations: bool = False) -> dict[str, set[str]]:
    """Module of `shared/` -> the modules of `shared/` that it imports."""
    paths = {catalogue.module_name(path): path for path in sorted((CHECKOUT / "shared").rglob("*.py"))}
    return {module: imported(path, set(paths), annotations) - {module} for module, path in paths.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules in which each reaches every other by imports: strongly connected, of two or more."""
    reached = {module: reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph if module in reached[module]}
    return [set(group) for group in sorted(groups, key=min)]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found
