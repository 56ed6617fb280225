"""The dependency graph of the repository's files, found by reading: imports, and the modules, files and folders that code names in strings.

It errs on the side of too many: an import inside a function counts, and a name that several files have means all of them.
"""

import ast
import json
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import translate
from functools import cached_property
from pathlib import Path, PurePosixPath

DATA = (".yaml", ".yml", ".toml", ".sbatch", ".sh")  # text that names modules and files without Python's syntax
NAMED = re.compile(r"[\w./*-]+\.(?:py|ya?ml|toml|md|ipynb|sh|sbatch|html|css|js|cpp|json)\b|shared(?:\.\w+)+")
PATH_LIKE = re.compile(r"[\w.*/:-]*[\w*]")  # a message or a sentence has spaces
MODULE = re.compile(r"(?:shared|chapters)(?:\.\w+)+")
EXERCISE = re.compile(r"(\d\d)\.(\w+)")


class Dependencies:
    """Files by their paths from `root`, as strings with slashes, each with the files that it names."""

    def __init__(self, root: Path):
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        self.files = {name for name in listed if (root / name).is_file()}
        self.folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents} - {"."}
        pytest_options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
        self.search_path = ["", *pytest_options["pythonpath"]]

    @cached_property
    def by_name(self) -> dict[str, list[str]]:
        """Last part of a path -> the files that end in it."""
        found = defaultdict(list)
        for name in sorted(self.files):
            found[PurePosixPath(name).name].append(name)
        return found

    @cached_property
    def slugs(self) -> dict[str, str]:
        """A chapter's number -> its name: 05 -> 05_optimizers."""
        return {PurePosixPath(name).name[:2]: PurePosixPath(name).stem for name in self.files if name.startswith("notebooks/")}

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        return {name: self.named_by(name) - {name} for name in sorted(self.files)}

    def distances(self, starts: Iterable[str], inside: tuple[str, ...] = ()) -> dict[str, int]:
        """Every file that `starts` depend on, and over how many others; with `inside`, only through folders that begin so."""
        found = dict.fromkeys(starts, 0)
        waiting = list(found)
        for name in waiting:
            for other in sorted(self.graph.get(name, ())):
                if other not in found and (not inside or other.startswith(inside)):
                    found[other] = found[name] + 1
                    waiting.append(other)
        return found

    def named_by(self, name: str) -> set[str]:
        path = self.root / name
        if name.endswith(".py"):
            return self.of_python(ast.parse(path.read_text(encoding="utf-8")), name)
        if name.endswith(".ipynb"):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
            return set().union(*(self.of_python(ast.parse(source), name) for source in sources))
        if name.endswith(DATA):
            words = NAMED.findall(path.read_text(encoding="utf-8"))
            return {file for word in words for file in (self.module(word) if MODULE.fullmatch(word) else self.matching(word, set()))}
        return set()

    def of_python(self, tree: ast.AST, name: str) -> set[str]:
        folder = str(PurePosixPath(name).parent)
        found, named = set(), Named(tree)
        for node in named.imports:
            found |= self.imported(node, folder)
        words = set() if name.startswith("shared/course/") else named.strings  # the tools list all chapters, and each test names its own
        folders = {word for word in words if word in self.folders and "/" in word} | {word for word in words if word.startswith("/")}
        for word in words:
            if MODULE.fullmatch(word.partition(":")[0]):
                found |= self.module(word.partition(":")[0])
            elif (exercise := EXERCISE.fullmatch(word)) and name.startswith(("shared/", "notebooks/", "tests/")):
                found |= self.of_exercise(*exercise.groups(), hole=name.startswith("shared/"))
            elif PATH_LIKE.fullmatch(word) and ("." in word or word in ("Makefile", "Dockerfile")):
                found |= self.matching(word.strip("/"), folders)
        if name.startswith("tests/") and PurePosixPath(name).name.startswith("test_"):
            found |= {f"{folder}/conftest.py"} & self.files
        else:
            found = {file for file in found if not file.endswith(".md")}  # a page that a message points to changes no result
        return found

    def of_exercise(self, number: str, name: str, hole: bool) -> set[str]:
        """What decides on an exercise; for its hole in the core the solution alone."""
        slug = self.slugs.get(number, "")
        exercises = "tests/exercises"
        decides = [f"{exercises}/checks/{slug}/{name}.py", f"{exercises}/mutants/{number}.toml", f"{exercises}/right_answers/{slug}.py"]
        return {f"solutions/{slug}.py", *(() if hole else decides)} & self.files

    def imported(self, node: ast.Import | ast.ImportFrom, folder: str) -> set[str]:
        if isinstance(node, ast.Import):
            return set().union(*(self.module(alias.name, folder) for alias in node.names))
        if node.level:
            base = PurePosixPath(folder).parents[node.level - 2] if node.level > 1 else PurePosixPath(folder)
            prefix = ".".join([*base.parts, *([node.module] if node.module else [])])
        else:
            prefix = node.module
        return self.module(prefix, folder).union(*(self.module(f"{prefix}.{alias.name}", folder) for alias in node.names))

    def module(self, dotted: str, folder: str = "") -> set[str]:
        """The file of a module, with the packages that its import runs; what follows a module's name is left away."""
        found, parts = set(), dotted.split(".")
        for base in [*self.search_path, folder]:
            for end in range(1, len(parts) + 1):
                place = "/".join([*([base] if base else []), *parts[:end]])
                found |= {f"{place}.py", f"{place}/__init__.py"} & self.files
            if found:
                break
        return found

    def matching(self, word: str, folders: set[str]) -> set[str]:
        """Files whose path ends in `word`, which may hold `*`; those in `folders` alone, where there are any."""
        last = PurePosixPath(word).name
        names = list(filter(re.compile(translate(last)).match, self.by_name)) if "*" in last else [last]
        whole = re.compile(translate(f"*/{word}"))
        ends = [file for name in names for file in self.by_name.get(name, ()) if whole.match(f"/{file}")]
        inside = {file for file in ends if any(f"/{file}".startswith(f"/{folder.strip('/')}/") for folder in folders)}
        return inside or (set() if "*" in last else set(ends))


class Named(ast.NodeVisitor):
    """What a program names: its imports, and its strings that are no docstrings.

    Paths that are joined by `/` are one string, from the root with a slash before it.
    """

    def __init__(self, tree: ast.AST):
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.strings: set[str] = set()
        self.visit(tree)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.imports.append(node)

    visit_ImportFrom = visit_Import

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        parts, root = [], node
        while isinstance(root, ast.BinOp) and isinstance(root.op, ast.Div):
            parts.insert(0, text_of(root.right))
            root = root.left
        if parts and isinstance(root, ast.Name) and root.id.isupper():
            self.strings.add("/".join([*([""] if root.id == "CHECKOUT" else []), *parts]))
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.strings.add(text_of(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.add(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        """A leaf: without this, half of the time would go into its context."""


def text_of(node: ast.expr) -> str:
    """A string's text, with `*` for what is known only when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(map(text_of, node.values)) if isinstance(node, ast.JoinedStr) else "*"
