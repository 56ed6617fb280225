"""Start a script as a user does, in a forked child of one process that has imported the libraries, or in an interpreter of its own.

Importing PyTorch takes longer than most scripts of the tests do. `run_script` hands a script to a server (this file, as a program) that
has imported the libraries and nothing of the course: it forks, and the child becomes the script, with its own folder, words, environment,
output and exit code. The trainer, where it runs with the reference, is handed to a server that has imported the trainer too, bound to the
reference. `fresh=True` starts Python instead: one test of each script does.
"""

import atexit
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TextIO

LIBRARIES = (
    "torch", "torch._dynamo", "numpy", "matplotlib.figure", "matplotlib.backends.backend_agg", "jsonargparse", "rich.console", "rich.table",
    "rich.progress", "safetensors.torch", "psutil", "yaml", "jinja2", "cloudpickle", "tokenizers", "pyarrow.parquet", "pyarrow.compute",
    "ftfy", "multiprocessing.connection", "nbformat",
)  # fmt: skip
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # what another thread holds, no child gets back
TIMEOUT = 600.0  # seconds, of a machine that does much else


def run_script(
    script: Path, *words: object, cwd: Path, interrupt_after: str = "", fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """Run a script to its end.

    Args:
        words: its command line.
        interrupt_after: Ctrl-C comes right after the first printed line that matches this pattern. The process sends it to itself, in
            the very write of that line: a test that watched the line would be too late where it is kept waiting.
        fresh: whether it gets an interpreter that has imported nothing.
        environment: variables beside those of this process.
    """
    command, environment = [str(script), *map(str, words)], {"OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        request = {"command": command, "folder": str(cwd), "output": str(output), "errors": str(errors)}
        request |= {"environment": environment, "interrupt_after": interrupt_after}
        if fresh:
            words = [sys.executable, __file__, json.dumps(request)] if interrupt_after else [sys.executable, *command]
            with open(output, "w") as out, open(errors, "w") as err:
                code = subprocess.run(words, cwd=cwd, env=os.environ | environment, stdout=out, stderr=err, timeout=TIMEOUT).returncode
        else:
            words = [__file__, "--trainer"] if is_trainer_with_reference(script, words, cwd) else [__file__]
            code = Server.started(*words).run(request)
        return subprocess.CompletedProcess(command, code, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8"))


def is_trainer_with_reference(script: Path, words: tuple[object, ...], cwd: Path) -> bool:
    """Whether a script is the trainer and its words ask for the solutions' bodies: only then may it be bound already."""
    from shared.course.errors import CourseError
    from shared.trainer.settings import implementation_asked

    first, *others = map(str, words or [""])
    file = first if "=" in first or first.startswith("-") or not first else str(cwd / first)
    try:
        return script.name == "train.py" and implementation_asked([file, *others]) == "reference"
    except (CourseError, AttributeError):  # a file that cannot be read, or holds no mapping: the trainer's to refuse
        return False


def refused(done: subprocess.CompletedProcess, said: str) -> bool:
    """Whether a script ended with a sentence that holds `said`, whatever its line breaks."""
    return done.returncode != 0 and said in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


def told_by(done: subprocess.CompletedProcess, folder: Path, learned: bool = True) -> dict:
    """The figures.json of a chapter's run in `folder`, which lasted three steps, learned (if so few can show it), and did what one process
    does."""
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "runs" / Path(done.args[0]).parent.name / "figures.json").read_text())
    assert len(told["losses"]) == 3 and (not learned or told["losses"][-1] < told["losses"][0])
    assert max(told["largest difference"].values()) < 1e-9
    return told


class Server:
    """The process that forks. It ends with the tests: nobody writes to it any more.

    Args:
        program: what it runs, a file that calls `next_request`, with words. `tests/hostile/hostile.py --serve` has imported the trainer.

    Attributes:
        processor_seconds: of the request that ended last, without what it started.
    """

    def __init__(self, *program: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, *program], env=os.environ | ONE_THREAD, **pipes)
        self.processor_seconds = 0.0
        atexit.register(self.end)

    @staticmethod
    @cache
    def started(*program: str) -> "Server":
        return Server(*program)

    def run(self, request: dict) -> int:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], TIMEOUT)[0]:
            self.end()
            raise subprocess.TimeoutExpired(request["command"], TIMEOUT)
        code, self.processor_seconds = map(float, self.process.stdout.readline().split())
        return int(code)

    def end(self) -> None:
        Server.started.cache_clear()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with a child that takes too long
        self.process.communicate()


class Watched:
    """A stream that lets a signal go off after the first line that matches."""

    def __init__(self, stream: TextIO, pattern: str):
        self.stream, self.pattern, self.line = stream, re.compile(pattern), ""

    def write(self, text: str) -> int:
        written = self.stream.write(text)
        *lines, self.line = (self.line + text).split("\n")
        if self.pattern and any(map(self.pattern.match, lines)):
            self.pattern = None
            self.stream.flush()
            signal.raise_signal(signal.SIGINT)
        return written

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def next_request() -> dict | None:
    """In the server: wait for requests and fork. Returns one in each child, and nothing in the server, when there are no more."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # or a child's first collection would touch, and so copy, all that was imported
    while line := sys.stdin.readline():
        if not (child := os.fork()):
            return json.loads(line)
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
    return None


def become(request: dict) -> None:
    """Turn this process into the script that was asked for."""
    for number, path in enumerate((os.devnull, request["output"], request["errors"])):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if request["interrupt_after"]:
        sys.stdout = Watched(sys.stdout, request["interrupt_after"])
    runpy.run_path(sys.argv[0], run_name="__main__")


def code_of(run: Callable[[], None]) -> int:
    """The exit code of a script, with what Python prints where it ends by an exception."""
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def exit_code_of(request: dict) -> int:
    """The exit code of the script that was asked for. Python's own end would also take all modules apart, for a second."""
    code = code_of(lambda: become(request))
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    return code


def next_request_to_the_trainer() -> dict | None:
    """`next_request`, in a server that has imported the trainer, bound to the reference as if chosen in the child's folder."""
    from shared.course import binding, launch, paths  # noqa: F401

    binding.choose("reference")
    import shared.trainer.run  # noqa: F401
    import shared.trainer.settings  # noqa: F401

    if request := next_request():
        os.chdir(request["folder"])
        binding._process.choice.workspace = paths.find_workspace()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return request


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            asked = next_request()
        case ["--trainer"]:
            asked = next_request_to_the_trainer()
        case [request]:
            asked = json.loads(request)
    if asked:
        os._exit(exit_code_of(asked))
