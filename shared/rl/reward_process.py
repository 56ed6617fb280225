"""Chapter 12. Time limit for rewards: they are computed in a process of their own, which is ended where one hangs.

A signal would not do: Python looks at it between two operations only, and one of C, such as a large power, can take a day.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shared.course.errors import CourseError
from shared.rl import reward_worker

START = 120.0  # seconds; a busy machine takes a while to import
Call = tuple[str, str, str, str]  # the name of a reward, prompt, answer, expected answer


class RewardProcess:
    """Computes rewards of texts.

    Args:
        functions: by name: None for a verifier, the pattern of a format, or the options of a function by import path. Verifiers that calls
            name besides are loaded when they do.
        seconds: that one reward may take, loading apart.
    """

    def __init__(self, functions: Mapping[str, str | None | dict[str, Any]], seconds: float):
        self.functions, self.seconds = dict(functions), seconds
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", reward_worker.__name__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.unread = b""
        self.send({"functions": self.functions, "seconds": self.seconds})
        failed = self.receive(START)
        if failed != {}:
            self.close()
            name, reason = next(iter(failed.items())) if isinstance(failed, dict) else (next(iter(self.functions)), failed)
            reason = reason if reason.endswith((".", "?")) else f"{reason}."
            raise CourseError(
                f"The reward {name} cannot be loaded: {reason} Give a function of your own by import path, such as "
                "my_module.my_reward, of a prompt, an answer and the expected answer, or a name of the course's."
            )

    def __call__(self, calls: Sequence[Call]) -> list[float | str]:
        """For each call its number, or the reason why there is none, NaN included."""
        found: list[float | str] = []
        if missing := dict.fromkeys(name for name, *_ in calls if name not in self.functions):
            self.functions = missing | self.functions
            self.close()
        while len(found) < len(calls):
            if self.process is None:
                self.start()
            self.send(calls[len(found) :])
            while len(found) < len(calls) and self.process is not None:
                answer = self.receive(self.seconds)
                if isinstance(answer, str):
                    self.close()
                found.append(answer["error"] if isinstance(answer, dict) else answer)
        return found

    def send(self, value: Any) -> None:
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # what is received says so
            pass

    def receive(self, seconds: float) -> Any:
        """The next answer; or text that says why there is none, after which the process is of no use."""
        channel, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.unread:
            ready, _, _ = select.select([channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return f"it took more than {seconds:g} seconds"
            read = os.read(channel, 1 << 16)
            if not read:
                return "it ended the process that computes rewards"
            self.unread += read
        line, self.unread = self.unread.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()

    __del__ = close
