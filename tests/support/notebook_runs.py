"""A notebook under nbval, with a kernel that is forked from a process that has imported the libraries.

nbval's process and its kernel would each import PyTorch or matplotlib, for five seconds a notebook. `verified` compares as `refresh.verify`
does, which starts Python for both. nbval waits for a cell's answer even where the kernel is gone: `watch` ends it then, and the frames
of a crash, or of what runs after CELL_SECONDS, stand in the report's errors.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from scripts import run_script

LAUNCHER = "ipykernel_launcher"
CELL_SECONDS = 240.0  # the whole notebook of chapter 06 took 98 where five ran at once on two cores
DIED = 100  # the exit code where nbval's kernel died: pytest's own are small
GRACE = 10.0  # seconds in which nbval ends by itself after its kernel


def verified(notebook, name: str, cell_seconds: float = CELL_SECONDS) -> subprocess.CompletedProcess:
    """nbval's exit code and report for a notebook (`nbformat.NotebookNode`) in a fresh workspace.

    A forked kernel that dies, or hangs for `cell_seconds`, says nothing of what a reader's kernel prints: with a warning that holds its
    frames, Python is started for both.
    """
    from shared.course import refresh

    refresh.list_fonts()
    with refresh.workspace(notebook, name) as path:
        words = [*refresh.nbval_words(path), "-x", f"--nbval-cell-timeout={cell_seconds}"]
        done = run_script(Path(__file__), *words, cwd=path.parent, **refresh.nbval_environment(path))
    if done.returncode != DIED and "Timeout of" not in done.stdout:
        return done
    warnings.warn(f"{name}: its forked kernel died or hung\n{done.stdout[-3000:]}\n{done.stderr}", stacklevel=2)
    return refresh.verify(notebook, name, {"OMP_NUM_THREADS": "1"})


class ForkedKernel:
    """A kernel's process, forked here and now, before threads and sockets; `start` turns it into the kernel. It is watched as a `Popen`."""

    stdin = stdout = stderr = None

    def __init__(self):
        self.returncode: int | None = None
        reading, self.writing = os.pipe()
        if not (child := os.fork()):
            os.close(self.writing)
            with open(reading, encoding="utf-8") as order:
                become_kernel(**json.loads(order.read()))
        os.close(reading)
        os.setpgid(child, child)  # a group of its own, to which signals go
        self.pid, self.lock = child, threading.Lock()

    def start(self, command: list[str], cwd: str, env: dict[str, str], **_) -> "ForkedKernel":
        with open(self.writing, "w", encoding="utf-8") as order:
            json.dump({"words": command[command.index(LAUNCHER) + 1 :], "cwd": cwd, "environment": env}, order)
        return self

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        return self._waited(0)

    def _waited(self, options: int) -> int | None:
        with self.lock:  # nbval and the watcher ask
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become_kernel(words: list[str], cwd: str, environment: dict[str, str]) -> None:
    """`python -m ipykernel_launcher WORDS`, which here imports little."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    errors = os.fdopen(os.dup(2), "w")  # a name of its own: a kernel captures what is written to 1 and 2
    faulthandler.enable(errors)
    faulthandler.dump_traceback_later(CELL_SECONDS, file=errors)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as nbval starts a kernel
    sys.argv, sys.path = [LAUNCHER, *words], sys.path[1:]
    import matplotlib
    from ipykernel.kernelapp import IPKernelApp

    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # as a kernel says before the first import
    try:
        IPKernelApp.launch_instance(argv=words)
    finally:
        os._exit(0)


def watch(kernel: ForkedKernel, errors: int) -> None:
    """End nbval where its kernel has ended first: nbval would wait on. errors: a file descriptor, which pytest does not capture."""
    while kernel.poll() is None:
        time.sleep(0.5)
    time.sleep(GRACE)
    os.write(errors, f"the kernel ended with exit code {kernel.returncode}, and nbval waited on\n".encode())
    os._exit(DIED)


if __name__ == "__main__":
    kernel = ForkedKernel()
    threading.Thread(target=watch, args=(kernel, os.dup(2)), daemon=True).start()

    import pytest
    from jupyter_client.provisioning import local_provisioner

    from shared.course.refresh import reach_kernels_by_files

    local_provisioner.launch_kernel = kernel.start
    reach_kernels_by_files()
    sys.exit(pytest.main(sys.argv[1:]))
