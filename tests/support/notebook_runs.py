"""A notebook under nbval, with a kernel that is forked from a process that has imported the libraries.

nbval's process and its kernel would each import PyTorch or matplotlib, for five seconds a notebook. `verified` compares as `refresh.verify`
does, which starts Python for both.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from scripts import run_script

LAUNCHER = "ipykernel_launcher"


def verified(notebook, name: str) -> subprocess.CompletedProcess:
    """nbval's exit code and report for a notebook (`nbformat.NotebookNode`) in a fresh workspace."""
    from shared.course import refresh

    refresh.list_fonts()
    with refresh.workspace(notebook, name) as path:
        return run_script(Path(__file__), *refresh.nbval_words(path), cwd=path.parent, **refresh.nbval_environment(path))


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
        self.pid = child

    def start(self, command: list[str], cwd: str, env: dict[str, str], **_) -> "ForkedKernel":
        with open(self.writing, "w", encoding="utf-8") as order:
            json.dump({"words": command[command.index(LAUNCHER) + 1 :], "cwd": cwd, "environment": env}, order)
        return self

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        return self._waited(0)

    def _waited(self, options: int) -> int | None:
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as nbval starts a kernel
    sys.argv, sys.path = [LAUNCHER, *words], sys.path[1:]
    import matplotlib
    from ipykernel.kernelapp import IPKernelApp

    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # as a kernel says before the first import
    try:
        IPKernelApp.launch_instance(argv=words)
    finally:
        os._exit(0)


if __name__ == "__main__":
    kernel = ForkedKernel()

    import pytest
    from jupyter_client.provisioning import local_provisioner

    from shared.course.refresh import reach_kernels_by_files

    local_provisioner.launch_kernel = kernel.start
    reach_kernels_by_files()
    sys.exit(pytest.main(sys.argv[1:]))
