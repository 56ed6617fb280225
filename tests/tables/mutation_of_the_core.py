"""Mutate random lines of the core and run the tests that import them: `python tests/tables/mutation_of_the_core.py --lines 20 --seed 1`.

For each line one edit, by the rules by which solutions are mutated (`edits`): operators, comparisons, numbers, `not`, dropped statements,
swapped or lost arguments. Then the nearest test files that depend on the module run, with `-x -m "not slow"`, until one fails or the
processor time is used up. A line may survive because its edit changes nothing, because only a test farther away would notice, or because
none does: which it is, a reader decides. The results of past seeds, judged, are in MUTATION.md.

The edit is made in this checkout, and taken back: do not work in it meanwhile.
"""

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from changed import nearest_tests  # noqa: E402
from dependencies import Dependencies  # noqa: E402
from edits import by_cosmic_ray, by_our_rules  # noqa: E402

from shared.course.paths import CHECKOUT  # noqa: E402

KILLED, STUCK, WAITING, ALIVE = "killed", "time is up", "waits for ever", "alive"
LOOK = 0.25  # seconds between two looks at the processor time
IDLE = 60.0  # seconds without any, after which an edit has made something wait for ever
WRAPPED = "def wrapped():\n"
READING = ("tests/course/test_prose.py", "tests/course/test_conventions.py")  # depend on every file, and run none
LONG = "tests/trainer/test_every_setting.py"  # depends on most of the core, and takes longest
LEFT_OUT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Edit:
    """One line of the core, and what stands there in its place. whole: the edited file."""

    path: str
    line: int
    before: str
    after: str
    whole: str


@dataclass(frozen=True)
class Verdict:
    """by: the first test that failed, or the test files that did not. seconds: of processor time."""

    edit: Edit
    state: str
    by: str
    seconds: float

    def row(self) -> str:
        shown = [text.replace("|", "\\|") for text in (self.edit.before, self.edit.after)]
        return f"| `{self.edit.path}:{self.edit.line}` | `{shown[0]}` -> `{shown[1]}` | {self.state}: {self.by} | {self.seconds:.0f} |"


def sources(chapter: str | None) -> dict[str, str]:
    """The files of the core, or of one chapter's floor, by their paths from the checkout."""
    found = {}
    for path in sorted((CHECKOUT / "shared").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        opening = "Floor 0." if chapter == "00" else f"Chapter {chapter}."
        if chapter is None or (ast.get_docstring(ast.parse(text)) or "").startswith(opening):
            found[path.relative_to(CHECKOUT).as_posix()] = text
    return found


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements within functions, without docstrings and definitions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and not isinstance(node, LEFT_OUT) and not is_text:
                    yield node


def heading(source: str, node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, from 0 and up to, not including, the last; of a compound one those before its body."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    last = (body[0].lineno if isinstance(body[0], ast.stmt) else body[0].pattern.lineno) - 1 if body else node.end_lineno
    return node.lineno - 1, last


def edits_of(path: str, source: str, node: ast.stmt) -> list[Edit]:
    """Every edit of one statement, or of a compound one's heading, that is another syntax tree."""
    lines, (first, last) = source.split("\n"), heading(source, node)
    own, is_simple = "\n".join(lines[first:last]), not hasattr(node, "body") and not hasattr(node, "cases")
    if last <= first or own.lstrip().startswith(("elif", "else", "case", "try", "finally", "except", "@")):
        return []
    indent = own[: len(own) - len(own.lstrip())]
    wrapped = WRAPPED + textwrap.indent(textwrap.dedent(own), "    ") + ("" if is_simple else "\n        pass")
    tree, found = ast.dump(ast.parse(source)), {}
    for operator, edited in [*by_cosmic_ray(wrapped), *by_our_rules(wrapped)]:
        if (operator == "statement" and not is_simple) or operator.endswith(("Eq_Is", "Eq_IsNot")):  # `is` mostly means `==` here
            continue
        after = textwrap.dedent(edited.removeprefix(WRAPPED).removesuffix("" if is_simple else "\n        pass"))
        whole = "\n".join([*lines[:first], textwrap.indent(after, indent), *lines[last:]])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                if ast.dump(ast.parse(whole)) != tree:
                    found[whole] = Edit(path, *first_difference(textwrap.dedent(own), after, first), whole)
        except SyntaxError:
            continue
    return list(found.values())


def first_difference(before: str, after: str, first: int) -> tuple[int, str, str]:
    """The number of the first line that differs, and both forms of it."""
    pairs = list(zip(before.split("\n"), after.split("\n"), strict=False))
    number = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
    return first + number + 1, pairs[number][0].strip(), pairs[number][1].strip()


def drawn(files: dict[str, str], count: int, seed: int) -> Iterator[Edit]:
    """One random edit of each of some random statements."""
    draw = random.Random(seed)
    everywhere = [(path, node) for path, source in files.items() for node in statements(ast.parse(source))]
    for path, node in draw.sample(everywhere, len(everywhere)):
        if count and (edits := edits_of(path, files[path], node)):
            count -= 1
            yield draw.choice(edits)


def tests_of(graph: Dependencies, path: str) -> list[str]:
    """The test files that depend on a file of the core, nearest first; of equally near ones those named after it, then its floor's."""
    nearest = [name for name in nearest_tests(graph, path) if name not in READING]
    stem, folder = Path(path).stem, f"tests/{path.split('/')[1].removesuffix('.py')}/"
    far = {name: path not in graph.graph[name] for name in nearest}
    return sorted(nearest, key=lambda name: (name == LONG, far[name], stem not in Path(name).stem, not name.startswith(folder)))


def tried(edit: Edit, tests: Sequence[str], seconds: float) -> Verdict:
    """Run tests over an edit, and take it back. A test that fails without the edit, too, is left out."""
    left_out: list[str] = []
    while True:
        with edited(edit):
            verdict = judged(edit, tests, seconds, left_out)
        if verdict.state != KILLED or judged(edit, [verdict.by], seconds).state != KILLED:
            return verdict
        left_out.append(verdict.by)


@contextmanager
def edited(edit: Edit) -> Iterator[None]:
    path = CHECKOUT / edit.path
    old = path.read_text(encoding="utf-8")
    path.write_text(edit.whole, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(old, encoding="utf-8")


def judged(edit: Edit, tests: Sequence[str], seconds: float, left_out: Sequence[str] = ()) -> Verdict:
    without = [word for name in left_out for word in ("--deselect", name)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests, *without]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(command, cwd=CHECKOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True, **pipes)
    used, gone, moved, before = {}, False, time.monotonic(), 0.0
    while running.poll() is None:
        used |= processor_time(running.pid)
        if (spent := sum(used.values())) > before + LOOK / 10:
            moved, before = time.monotonic(), spent
        if gone := spent > seconds or time.monotonic() > moved + IDLE:
            os.killpg(running.pid, signal.SIGKILL)
            break
        time.sleep(LOOK)
    said, _ = running.communicate()
    spent = sum(used.values())
    failed = [line.split(" - ")[0].split(maxsplit=1)[1] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if gone:
        return Verdict(edit, STUCK if spent > seconds else WAITING, f"{said.count('.')} dots in {', '.join(tests)}", spent)
    return Verdict(edit, KILLED, failed[0], spent) if failed else Verdict(edit, ALIVE, ", ".join(tests), spent)


def processor_time(pid: int) -> dict[int, float]:
    """Seconds of a process and of those below it, by their numbers."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    except psutil.Error:  # one of them has just ended
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutate random lines of the core and see which tests notice.")
    parser.add_argument("--lines", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the lines and of their edits")
    parser.add_argument("--chapter", metavar="NN", help="lines of this floor alone; 00 for the learner's tools")
    parser.add_argument("--seconds", type=float, default=40.0, help="processor time for each line")
    parser.add_argument("--files", type=int, default=8, help="test files for each line, at most")
    parser.add_argument("--only", type=int, nargs="*", help="these lines of the draw, from 1")
    options = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain", "shared"], cwd=CHECKOUT, capture_output=True, check=True).stdout:
        sys.exit("shared/ differs from its commit, and an edit that is taken back would hide in it: commit first.")
    graph = Dependencies(Path(CHECKOUT))
    print("| line | edit | verdict | s |\n| --- | --- | --- | ---: |")
    for number, edit in enumerate(drawn(sources(options.chapter), options.lines, options.seed), 1):
        if not options.only or number in options.only:
            print(tried(edit, tests_of(graph, edit.path)[: options.files], options.seconds).row(), flush=True)


if __name__ == "__main__":
    main()
