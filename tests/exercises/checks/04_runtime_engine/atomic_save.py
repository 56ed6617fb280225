"""Check of 04.atomic_save. Oracle: the operating system, whose calls are written down: what was forced to the disk before which
renaming, and what a reader would have found under the target's name before and after every call that changes a folder.

Tolerances: none. The files are small texts, in a temporary folder of the case's own.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = "the operating system's calls, written down"
FLAT = {"weights": "new weights", "state": "new state"}
DEEP = {"weights": "new weights", "optimizer/first": "new first", "optimizer/more/second": "new second"}
EMPTY = {"weights": "new weights", "complete": "", "optimizer/shards": "(empty)"}  # an empty file, and a folder with nothing in it
DOTTED = {"weights": "new weights", ".state": "new state"}
OLD = {"weights": "old weights", "only in the old": "something"}
CHANGING = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync")


def given(files: dict[str, str], name: str = "step-7", existing: dict | None = None, leftover: dict | None = None):
    """files: what `write` writes. existing: what stands under the target's name. leftover: in the partial folder of a killed run."""
    return lambda: {"name": name, "files": files, "existing": existing, "leftover": leftover}


def fill(folder: Path, files: dict[str, str] | None) -> None:
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if text == "(empty)" else (folder / name).write_text(text)


def tree(folder: Path) -> dict[str, str] | None:
    """Files below a folder with their text; a folder without files is shown as "(empty)". None where there is no folder."""
    if not folder.is_dir():
        return None
    paths = sorted(path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir()))
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else "(empty)" for path in paths}


def workplace() -> Path:
    return Path(tempfile.gettempdir(), f"course-atomic-{os.getpid()}")


@contextlib.contextmanager
def place(name: str, existing: dict | None, leftover: dict | None, fsync: Callable[[int], None] = lambda handle: None) -> Iterator[Path]:
    """A target in a folder `runs`, with an earlier checkpoint beside it. The folder has the same name each time, since errors
    tell it. Waiting for the disk is left out: who asks for it is what counts."""
    folder = workplace()
    target = folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)  # of a check that was killed
    fill(target.with_name("step-3"), {"weights": "of step 3"})
    fill(target, existing)
    fill(target.with_name(f"{name}.partial"), leftover)
    try:
        with mock.patch.object(os, "fsync", fsync):
            yield target
    finally:
        shutil.rmtree(folder)


def standing(function, name, files, existing, leftover):
    """What the run's folder holds after the save."""
    with place(name, existing, leftover) as target:
        function(target, lambda folder: fill(folder, files))
        return {"standing": tree(target.parent)}


def expected_standing(name, files, **given):
    return {"standing": {"step-3/weights": "of step 3"} | {f"{name}/{file}": text for file, text in files.items()}}


def standing_after_two(function, name, files, existing, leftover):
    with place(name, existing, leftover) as target:
        function(target, lambda folder: fill(folder, OLD))
        function(target, lambda folder: fill(folder, files))
        return {"standing": tree(target.parent)}


def handed(function, name, files, existing, leftover):
    """The folder that `write` is given, and what stands under the target's name before and after it has written."""
    calls = []

    with place(name, existing, leftover) as target:

        def write(folder: Path) -> None:
            call = {"folder": str(folder.relative_to(target.parent.parent)), "it holds": tree(folder), "target before": tree(target)}
            fill(folder, files)
            calls.append(call | {"target after": tree(target)})

        function(target, write)
    return {f"call {number} of write": call for number, call in enumerate(calls, 1)}


def expected_handed(name, existing, **given):
    return {"call 1 of write": {"folder": f"runs/{name}.partial", "it holds": {}, "target before": existing, "target after": existing}}


def interrupted(error: BaseException):
    """`write` raises after its first file."""

    def observe(function, name, files, existing, leftover):
        def write(folder: Path) -> None:
            fill(folder, dict([*files.items()][:1]))
            raise error

        return failing(function, write, name, existing, leftover)

    return observe


def broken_disk(function, name, files, existing, leftover):
    """Forcing to the disk fails."""

    def fsync(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    return failing(function, lambda folder: fill(folder, files), name, existing, leftover, fsync=fsync)


def broken_name(function, name, files, existing, leftover):
    """Forcing the new name to the disk fails."""
    runs = workplace() / "runs"

    def fsync(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), runs.stat()) and not (runs / f"{name}.partial").exists():
            raise OSError(errno.EIO, "Input/output error")

    return failing(function, lambda folder: fill(folder, files), name, existing, leftover, fsync=fsync)


def failing(function, write, *standing, **more):
    with place(*standing, **more) as target:
        try:
            function(target, write)
            error = "no error"
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {"went on": error, "standing": tree(target.parent)}


def expected_failing(error: str):
    def expected(name, existing, **given):
        kept = {f"{name}/{file}": text for file, text in (existing or {}).items()}
        return {"went on": error, "standing": {"step-3/weights": "of step 3"} | kept}

    return expected


class Calls:
    """Writes down, for every call of os that changes a folder or forces one to the disk, what it found.

    forced: paths forced to the disk since the last renaming, relative to the run's folder ("." is that folder), with what they held.
    forced_before: those forced before the folder got the target's name.
    too_early: those of them that held something else by then.
    found: what a reader finds under the target's name, each time that it changes.
    """

    def __init__(self, target: Path, old: dict | None, new: dict):
        self.target, self.old, self.new = target, old, new
        self.forced: dict[str, str | list[str] | None] = {}
        self.forced_before: set[str] = set()
        self.too_early: list[str] = []
        self.found: list[str] = []

    def look(self) -> None:
        here = tree(self.target)
        known = {"nothing": None, "the new": self.new, "the old": self.old}
        seen = next((name for name, files in known.items() if files == here), f"half of one: {[*(here or {})]}")
        if self.found[-1:] != [seen]:
            self.found.append(seen)

    def watched(self, name: str):
        original = getattr(os, name)

        def call(*args, **kwargs):
            self.look()
            if name == "fsync":
                forced = self.name_of(args[0])
                self.forced[forced] = self.held(forced)
            if renaming := name in ("rename", "replace") and Path(args[1]) == self.target:
                inside = {path: was for path, was in self.forced.items() if path != "."}
                self.too_early = sorted(path for path, was in inside.items() if self.held(path) != was)
            result = original(*args, **kwargs)
            if renaming:
                self.forced_before, self.forced = {*self.forced} - {*self.too_early}, {}
            self.look()
            return result

        return mock.patch.object(os, name, call)

    def name_of(self, handle: int) -> str:
        folder = self.target.parent
        same = [path for path in [folder, *folder.rglob("*")] if os.path.samestat(path.stat(), os.fstat(handle))]
        return str(same[0].relative_to(folder)) if same else "something else"

    def held(self, name: str) -> str | list[str] | None:
        """A file's text, a folder's list of names."""
        path = self.target.parent / name
        if path.is_dir():
            return sorted(entry.name for entry in path.iterdir())
        return path.read_text() if path.exists() else None


def watch(function, name, files, existing, leftover) -> Calls:
    with place(name, existing, leftover) as target, contextlib.ExitStack() as stack:
        calls = Calls(target, existing, files)
        for call in CHANGING:
            stack.enter_context(calls.watched(call))
        function(target, lambda folder: fill(folder, files))
        calls.look()
    return calls


def forced(function, name, files, **more):
    calls = watch(function, name, files, **more)
    partial = Path(f"{name}.partial")
    paths = {str(parent) for file in files for parent in [partial / file, *(partial / file).parents]} - {"."}
    missing, unnamed = sorted(paths - calls.forced_before), sorted({"."} - calls.forced.keys())
    return {
        "not forced to the disk before it got its name": missing,
        "not forced to the disk afterwards": unnamed,
        "but afterwards": sorted(calls.forced.keys() - {"."}) if missing or unnamed else [],
        "forced before it held what it holds": [path for path in calls.too_early if path in missing],
    }


def all_forced(**given):
    return {
        "not forced to the disk before it got its name": [], "not forced to the disk afterwards": [], "but afterwards": [],
        "forced before it held what it holds": [],
    }


def named_after_all(name, files, **given):
    return {"went on": "OSError: [Errno 5] Input/output error"} | expected_standing(name, files)


def found(function, **given):
    """A moment with nothing under the name is left out: `replace_folder` needs one where there is an old folder."""
    return {"a reader finds": [seen for seen in watch(function, **given).found if seen != "nothing"]}


def ending(title: str, make, error: BaseException) -> Case:
    return Case("property", title, make, expected_failing(f"{type(error).__name__}: {error}"), CONTRACT, interrupted(error))


CHECK = Check(
    exercise="04.atomic_save",
    outputs=(),
    spoilt=("files of target",),
    cases=[
        Case("worked example", "two files", given(FLAT), expected_standing, CONTRACT, standing),
        Case("worked example", "three files, one of them two folders deep", given(DEEP), expected_standing, CONTRACT, standing),
        Case(
            "worked example", "in place of an older folder, which goes as a whole", given(FLAT, existing=OLD), expected_standing, CONTRACT,
            standing,
        ),
        Case("property", "a name with a dot", given(FLAT, name="loss-2.31"), expected_standing, CONTRACT, standing),
        Case("property", "what `write` is given", given(FLAT), expected_handed, CONTRACT, handed),
        Case("property", "what `write` is given, for a name with a dot", given(FLAT, name="loss-2.31"), expected_handed, CONTRACT, handed),
        Case("property", "an older folder stays while `write` writes", given(FLAT, existing=OLD), expected_handed, CONTRACT, handed),
        Case(
            "property", "a killed run left a partial folder", given(FLAT, leftover={"weights": "half", "optimizer/first": "half"}),
            expected_standing, CONTRACT, standing,
        ),
        Case(
            "property", "a killed run left a partial folder: `write` is given an empty one",
            given(FLAT, existing=OLD, leftover={"weights": "half"}), expected_handed, CONTRACT, handed,
        ),
        Case("property", "two saves under one name", given(DEEP), expected_standing, CONTRACT, standing_after_two),
        ending("`write` raises after its first file", given(FLAT), RuntimeError("no weights")),
        ending("`write` raises, and there is an older folder", given(DEEP, existing=OLD), RuntimeError("no weights")),
        ending("Ctrl-C while `write` writes", given(DEEP, existing=OLD), KeyboardInterrupt()),
        ending("the process is asked to end while `write` writes", given(DEEP, existing=OLD), SystemExit(143)),
        Case(
            "property", "forcing to the disk fails", given(FLAT, existing=OLD), expected_failing("OSError: [Errno 5] Input/output error"),
            CONTRACT, broken_disk,
        ),
        Case("oracle", "what is on the disk when the folder gets its name", given(FLAT), all_forced, ORACLE, forced),
        Case("oracle", "the same with folders in it, and an older one in its place", given(DEEP, existing=OLD), all_forced, ORACLE, forced),
        Case("oracle", "what a reader finds meanwhile", given(DEEP), lambda **given: {"a reader finds": ["the new"]}, ORACLE, found),
        Case(
            "oracle", "what a reader finds meanwhile, where there is an older folder", given(DEEP, existing=OLD),
            lambda **given: {"a reader finds": ["the old", "the new"]}, ORACLE, found,
        ),
        Case("oracle", "what is on the disk of a file whose name begins with a dot", given(DOTTED), all_forced, ORACLE, forced),
        Case("oracle", "what is on the disk of an empty file, and of an empty folder", given(EMPTY), all_forced, ORACLE, forced),
        Case("oracle", "forcing the new name to the disk fails", given(FLAT), named_after_all, CONTRACT, broken_name),
    ],
)
