"""The tests that a change concerns: those that depend, over whichever files, on one that differs from a commit. `make test BASE=main`."""

import re
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from dependencies import Dependencies

EVERYTHING = ("pyproject.toml", "tests/conftest.py", ".ci/", "environment.yml")  # what each test runs on
TOOLS = ("shared/course/", "tests/")  # what judges each exercise, notebook or module, whichever it is
OF_A_PARAMETER = {  # files whose tests judge what their parameters name
    "test_checks", "test_builds", "test_build_stages", "test_hunts", "test_notebooks", "test_conventions", "test_reading", "test_examples",
}  # fmt: skip


def changed_files(base: str, root: Path) -> set[str]:
    """Paths from `root` of what differs from the commit `base`, new and deleted files included.

    Raises:
        pytest.UsageError: there is no such commit.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(f"BASE={base}: git knows no such commit. It says: {done.stderr.strip()}")
        return done.stdout.splitlines()

    return {*git("diff", "--name-only", "--no-renames", base, "--"), *git("ls-files", "--others", "--exclude-standard")}


class Affected:
    """Which tests a set of changed files concerns.

    Args:
        changed: paths from the graph's root.
    """

    def __init__(self, graph: Dependencies, changed: set[str]):
        self.graph, self.changed = graph, changed
        self.everything = any(name.startswith(EVERYTHING) for name in changed)
        self.deleted = {PurePosixPath(name).name for name in changed - graph.files}
        self.reaches = cache(self._reaches)

    def __contains__(self, item: pytest.Item) -> bool:
        name = str(item.path.relative_to(self.graph.root).as_posix())
        parameters = getattr(item, "callspec", None)
        judged = self.judged(parameters.id) if parameters and item.path.stem in OF_A_PARAMETER else frozenset()
        return self.everything or (self.reaches((name,), TOOLS) or self.reaches(judged) if judged else self.reaches((name,)))

    def _reaches(self, starts: tuple[str, ...] | frozenset[str], inside: tuple[str, ...] = ()) -> bool:
        found = self.graph.distances(starts, inside)
        return not self.changed.isdisjoint(found) or any(self.names_a_deleted(name) for name in found if self.deleted)

    def names_a_deleted(self, name: str) -> bool:
        """Whether a file still names one that is gone, which the graph cannot know."""
        text = (self.graph.root / name).read_text(encoding="utf-8", errors="replace")
        return any(re.search(rf"\b{re.escape(PurePosixPath(gone).stem)}\b", text) for gone in self.deleted)

    def judged(self, parameters: str) -> frozenset[str]:
        """What the parameters of a test name: an exercise, a chapter, a build, a hunt, a file of the repository."""
        files = self.graph.files
        if parameters in files:
            return frozenset({parameters})
        if exercise := re.match(r"(\d\d)\.(?!build|hunt)(\w+)", parameters):
            number, name = exercise.groups()
            holes = {file for file in files if file.startswith("shared/") and f"@exercise(\"{exercise[0]}\")" in self.text(file)}
            return frozenset(self.graph.of_exercise(number, name, hole=False) | holes | self.of_chapter(number, "chapters/"))
        if chapter := re.match(r"(\d\d)[._]", parameters):
            return frozenset(self.of_chapter(chapter[1], "chapters/", "notebooks/", "solutions/", "tests/exercises/"))
        return frozenset()

    def of_chapter(self, number: str, *roots: str) -> set[str]:
        """A chapter's own files below `roots`, without its lists of mutants and its runs' configurations."""
        of_it = re.compile(rf"(?:^|/){number}[_.]")
        return {name for name in self.graph.files if name.startswith(roots) and of_it.search(name) and not name.endswith((".yaml", ".md"))}

    @cache
    def text(self, name: str) -> str:
        return (self.graph.root / name).read_text(encoding="utf-8") if name.endswith(".py") else ""


def nearest_tests(graph: Dependencies, changed: str) -> list[str]:
    """Test files that depend on one file, those first that reach it over the fewest others."""
    tests = [name for name in sorted(graph.files) if re.fullmatch(r"tests/(?:\w+/)*test_\w+\.py", name)]
    found = {name: distances[changed] for name in tests if changed in (distances := graph.distances([name]))}
    return sorted(found, key=found.get)
