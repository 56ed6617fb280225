"""Hostile input as a table: what goes in, the exit code, and what the sentence must name. `python tests/hostile/hostile.py` prints it.

A row is one command or library call that must end with a sentence (or must work: code 0). Rows stand in `tests/hostile/rows/THEME.py`,
each of which has a list `ROWS`; `test_hostile.py` runs all of them. To add one, append to a theme's list, or begin a file:

    from hostile import Row, call, chapter, start, trainer

    def a_folder(folder):                       # makes what the row needs in its own empty folder
        (folder / "texts").mkdir()

    def read_nothing():                         # a library call: what it raises is printed, as a script would print it
        read_figures(Path("none.jsonl"))        # its current folder is the row's

    ROWS = [
        Row("a rate that is no number", trainer("optimizer.lr=.nan"), "optimizer.lr is nan"),
        Row("a section that is a list", trainer(model=[1]), "model"),                                  # changes tiny.yaml
        Row("an empty folder", trainer("data.prepare.sources=[{path: texts}]"), "texts holds no file", code=1, make=a_folder),
        Row("no such layout", start("dp0", "{folder}/tiny.yaml"), "parallel.data_parallel is 0", code=1),
        Row("no steps", chapter("01", "--steps", "0"), "steps is 0", code=1),
        Row("a log that is not there", call(read_nothing), "none.jsonl", code=1),
        Row("a damaged checkpoint", trainer(), ("is damaged", "Going on"), code=0, make=damage, trained=True, keeps=False),
    ]

Each row gets a folder of its own as current folder, `{folder}` in its words. In it are `tiny.yaml`, the settings of
`trainer_runs.TINY` with `engine.output` as `{folder}/run`; the text that they need, prepared, in `{folder}/prepared`; and with `trained`
the finished run in `{folder}/run`. What holds for every row, whatever it says: no traceback, at most LINES lines on standard error, an end
within its seconds, and checkpoints that were there are still there, as they were.

Rows run in children forked from a process that has imported the trainer and computed nothing: a tenth of a second each. The script prints
what each row said as Markdown; words after it choose rows by parts of their names or themes.
"""

import atexit
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]  # as a script; pytest has them already

from scripts import Server, exit_code_of, next_request_to_the_trainer  # noqa: E402

LINES = 3  # on standard error
WAITING = 90.0  # seconds by the clock, of a machine that does nothing else; a row's own seconds count the processor's time
MEMORY = 8 * 2**30  # bytes of data that a row may allocate
SHOWN = 300  # characters of a sentence in the table


@dataclass(frozen=True)
class Command:
    """What a row runs. Write it with `trainer`, `start`, `chapter` or `call`.

    Args:
        script: relative to the checkout.
        words: its command line.
        changes: of tiny.yaml.
        function: in place of a script, (file, name) of a function without arguments.
    """

    script: str = ""
    words: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    function: tuple[str, str] | None = None

    def __str__(self) -> str:
        name = {"shared/trainer/launch/start.py": "start"}.get(self.script, Path(self.script).stem)
        name = f"{Path(self.script).parent.name[:2]} run" if name == "run" else name
        return " ".join([f"{self.function[1]}()"] if self.function else [name, *self.words])


def trainer(*words: str, config: str = "{folder}/tiny.yaml", **changes: Any) -> Command:
    """The trainer on `config` with these key=value words; keywords change sections and keys of tiny.yaml."""
    return Command("chapters/12_grpo/train.py", (config, *words) if config else words, changes)


def start(*words: str, **changes: Any) -> Command:
    """The launcher of `make run LAYOUT=...`: a layout, a configuration, key=value words."""
    return Command("shared/trainer/launch/start.py", words, changes)


def chapter(number: str, *words: str) -> Command:
    """A chapter's run script with these options."""
    return Command(next((HERE.parents[1] / "chapters").glob(f"{number}_*/run.py")).relative_to(HERE.parents[1]).as_posix(), words)


def call(function: Callable[[], None]) -> Command:
    """A function of a file of rows, called in the row's folder. A CourseError or ValueError ends it with code 1."""
    return Command(function=(function.__code__.co_filename, function.__name__))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: the input, in a few words.
        command: what is run.
        says: what its output must name, each of them, whatever the line breaks.
        code: the exit code; 2 for words and files that cannot be a configuration, 1 for what is found later.
        make: make(folder) makes what the row needs.
        environment: variables for the process.
        trained: whether a finished run is in {folder}/run.
        keeps: whether the checkpoints of {folder}/run must stay as they were; False where the row goes on training.
        seconds: of the processor's time that it may take.
    """

    name: str
    command: Command
    says: str | tuple[str, ...] = ()
    code: int = 2
    make: Callable[[Path], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    trained: bool = False
    keeps: bool = True
    seconds: float = 20.0


@dataclass(frozen=True)
class Ended:
    """What a row came to: problems are what it did not keep."""

    code: int
    output: str
    errors: str
    processor_seconds: float
    problems: list[str]

    @property
    def sentence(self) -> str:
        return " ".join((self.errors.strip() or self.output.strip()).split())


def themes() -> dict[str, list[Row]]:
    """The rows of each file, by its name."""
    return {path.stem: load(path).ROWS for path in sorted((HERE / "rows").glob("*.py"))}


@cache
def load(path: Path) -> ModuleType:
    """A file of rows, under a name of its own: `sources.py` here is no library's."""
    specification = importlib.util.spec_from_file_location(f"hostile_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


@cache
def finished_run() -> Path:
    """A folder with a run of TINY that has ended, and its prepared text: made once in each process of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ended = execute(folder, trainer(), {}, 300.0)
    assert ended[0] == 0, ended
    return folder


def run(row: Row, folder: Path) -> Ended:
    """Run a row in an empty folder."""
    before = finished_run()
    shutil.copytree(before / "prepared", folder / "prepared")
    if row.trained:
        shutil.copytree(before / "run", folder / "run")
    if row.make:
        row.make(folder)
    kept = checkpoints(folder) if row.keeps else {}
    code, output, errors, seconds = execute(folder, row.command, row.environment, row.seconds)
    return Ended(code, output, errors, seconds, list(problems(row, code, output, errors, seconds, kept, folder)))


def problems(row: Row, code: int, output: str, errors: str, seconds: float, kept: dict[str, str], folder: Path) -> Iterator[str]:
    """What a row promises and did not keep."""
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        yield f"it did not end within {row.seconds:g} s of computing, or {WAITING:g} s by the clock of an idle machine"
    elif code != row.code:
        yield f"its exit code is {code} and not {row.code}"
    said = " ".join((output + errors).split())
    for part in [row.says] if isinstance(row.says, str) else row.says:
        if " ".join(part.split()) not in said:
            yield f"it does not say {part!r}"
    if "Traceback" in said:
        yield "a traceback"
    if (lines := sum(bool(line.strip()) for line in errors.splitlines())) > LINES:
        yield f"{lines} lines on standard error"
    if kept and checkpoints(folder) != kept:
        yield "the run's checkpoints are not what they were"


def checkpoints(folder: Path) -> dict[str, str]:
    """A hash of each file of the run's checkpoints, by its path."""
    files = sorted(path for path in (folder / "run" / "checkpoints").rglob("*") if path.is_file() and os.access(path, os.R_OK))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def execute(folder: Path, command: Command, environment: dict[str, str], seconds: float) -> tuple[int, str, str, float]:
    """Exit code, standard output, standard error and the processor's seconds of a command in a fresh child."""
    from trainer_runs import settings_file

    if not (folder / "tiny.yaml").exists():
        settings_file(folder, folder / "prepared", **command.changes)
    script, words = str(HERE.parents[1] / command.script), [word.replace("{folder}", str(folder)) for word in command.words]
    with tempfile.TemporaryDirectory(prefix="hostile-row-") as apart:
        output, errors = Path(apart, "output"), Path(apart, "errors")
        request = {"command": [script, *words], "folder": str(folder), "output": str(output), "errors": str(errors)}
        request |= {"environment": environment, "interrupt_after": "", "function": command.function, "seconds": seconds}
        server = Server.started(__file__, "--serve")
        code = server.run(request)
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (output, errors)]
    return code, *said, server.processor_seconds


def serve() -> None:
    """The process that forks: it has imported the trainer, and each child becomes a row."""
    if not (request := next_request_to_the_trainer()):
        return
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_REAL, WAITING * max(1.0, os.getloadavg()[0] / os.cpu_count()))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    if request["function"]:
        request["command"] = [__file__, "--call", *request["function"]]
    os._exit(exit_code_of(request))


def call_function(path: str, name: str) -> None:
    """A library call, with errors that a reader can mend as a script shows them."""
    from shared.course.errors import CourseError

    try:
        getattr(load(Path(path)), name)()
    except (CourseError, ValueError) as error:
        sys.exit(str(error))


def markdown(words: list[str]) -> Iterator[str]:
    """The table's lines: all rows, or those whose theme or name holds one of the words."""
    for theme, rows in themes().items():
        chosen = [row for row in rows if not words or any(word in f"{theme} {row.name}" for word in words)]
        if chosen:
            yield f"\n## {theme}\n\n| input | command | exit code | what it says |\n|---|---|---|---|"
        for row in chosen:
            with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
                ended = run(row, Path(folder))
                told = ended.sentence.replace(folder, "").replace("|", "\\|")
            told = told if len(told) <= SHOWN else f"{told[:SHOWN]} ..."
            failed = f" **{'; '.join(ended.problems)}**" if ended.problems else ""
            yield f"| {row.name} | `{row.command}` | {ended.code} | {told}{failed} |".replace("{folder}/", "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call_function(*sys.argv[2:])
    elif sys.argv[1:] == ["--serve"]:
        serve()
    else:
        for line in markdown(sys.argv[1:]):
            print(line, flush=True)
