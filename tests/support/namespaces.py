"""Linux namespaces (network, mounts, hostname, processes) and commands inside them: what the machines of `two_machines.py` are made of."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from shared.course.paths import CHECKOUT

if TYPE_CHECKING:
    from two_machines import Machine

NAMESPACES = ["--net", "--mount", "--uts", "--pid"]
UNSHARE = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
ROOT = os.geteuid() == 0


class Unsupported(Exception):
    """Namespaces cannot be made here; the message has the reason."""


class Namespaces:
    """The first process of new namespaces; with it, everything in them ends."""

    def __init__(self, script: str, before: Sequence[str] = (), **variables: str):
        command = [*before, *UNSHARE, "sh", "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=os.environ | variables, text=True, **pipes)
        if self.process.stdout.readline() != "ready\n":
            raise Unsupported(self.process.communicate()[1].strip() or "namespaces cannot be made")
        self.first = psutil.Process(self.process.pid).children(recursive=True)[-1].pid

    def enter(self, *namespaces: str) -> list[str]:
        """The start of a command that runs inside."""
        user = [] if ROOT else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.first), *user, *namespaces, "--"]

    def ip(self, *words: str, tool: str = "ip") -> None:
        subprocess.run([*self.enter("--net"), tool, *words], check=True, capture_output=True, text=True)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Job:
    """A command on a machine.

    Attributes:
        lines: (time, line) of standard output and standard error, with the time of `time.monotonic`.
        ended: when it ended; None before.
    """

    def __init__(self, machine: "Machine", words: Sequence[str], environment: dict[str, str]):
        self.machine, self.lines, self.ended, self.started = machine, [], None, time.monotonic()
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [*machine.space.enter(*NAMESPACES), "env", f"--chdir={CHECKOUT}", *words]
        self.process = subprocess.Popen(command, env=environment, text=True, errors="replace", **pipes)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        threading.Thread(target=self.watch, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def watch(self) -> None:
        self.process.wait()
        self.ended = time.monotonic()

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return its exit code; minus the signal that ended it.

        Raises:
            AssertionError: it runs for longer than `timeout` seconds from now.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"on {self.machine.name}, still running after {timeout} s:\n{self.output}") from None
        self.reader.join(10)  # processes that it left behind may hold the pipe
        return code

    def when(self, pattern: str, since: float = 0.0) -> float | None:
        """The time of the first line that matches, of those from the time `since`."""
        return next((at for at, line in list(self.lines) if at >= since and re.search(pattern, line)), None)

    def wait_for(self, pattern: str, timeout: float, since: float = 0.0) -> float:
        """The time of the first line that matches, waited for.

        Raises:
            AssertionError: there is none within `timeout` seconds from now, or the command has ended without one.
        """
        deadline = time.monotonic() + timeout
        while (at := self.when(pattern, since)) is None:
            if time.monotonic() > deadline or not (self.reader.is_alive() or self.when(pattern, since)):
                raise AssertionError(f"on {self.machine.name}, no {pattern!r} within {timeout} s:\n{self.output}")
            time.sleep(0.02)
        return at
