"""Chapter 12. A pool of sandbox workers: programs go in, what their functions returned comes out, and no program reaches the next.

What comes out is a claim, read as JSON of limited size. A worker that is lost, or does not answer in time, is replaced, and its program
tried once more. Each new worker first runs a program that tries what the sandbox forbids: should one attempt succeed, none is used.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.values import encode
from shared.rl.sandbox.worker import read_message, write_message

START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from shared.rl.sandbox.worker import main; main()"
# Without the folders of installed packages, and with a fixed hash seed: a set's order must not change a reward.
COMMAND = [sys.executable, "-S", "-s", "-P", "-B", "-c", START, str(CHECKOUT)]
ENVIRONMENT = {"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
GRACE = 20.0  # seconds beyond a program's own that a worker has for an answer on a busy machine
STARTING = 60.0  # seconds that a worker has for its start
TRIES = 2
ATTEMPTS = """
def succeeded(path, process):
    import ctypes, os, socket
    attempts = {
        "open a file": lambda: open(path, "rb"), "start a process": os.fork, "open a socket": socket.socket,
        "send a signal": lambda: os.kill(process, 0), "look into a process": lambda: open(f"/proc/{process}/mem", "rb"),
        "run a command": lambda: os.execv(path, [path]), "trace itself": lambda: ctypes.CDLL(None).ptrace(0, 0, 0, 0) and os.fork(),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
            found.append(name)
        except OSError:
            pass
    return found
"""


@dataclass(frozen=True)
class Call:
    """A program's text, the name of the function in it, and the arguments of each call: values of the types that values.py names."""

    program: str
    function: str
    inputs: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Outcome:
    """What a program did.

    Attributes:
        ended: "finished": a result for each call. Otherwise what ended it: "CPU time", "wall time", "output", "killed by SIGSEGV", "quit"
            (it ended itself), "failed" (it raised as a whole), "malformed" (its results are no such), "too long", "worker lost".
        results: for each call that it came to, ("value", form) or ("raised", words). A form is to be compared, with `values.same`.
        words: the error of a program that failed, in ASCII.
    """

    ended: str
    results: tuple[tuple[str, Any], ...] = ()
    words: str = ""


class WorkerLost(Exception):
    """A worker has ended, or its answer is overdue."""


class Worker:
    """One worker process, seen from the trainer."""

    def __init__(self, limits: Limits, namespaces: bool):
        settings = json.dumps({"limits": asdict(limits), "namespaces": namespaces})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        # A session of its own: Ctrl-C is for the trainer, which then closes the pipe, and a worker ends with all its children at once.
        self.process = subprocess.Popen([*COMMAND, settings], env=ENVIRONMENT, start_new_session=True, **pipes)
        self.limits, self.number, self.overdue = limits, None, time.monotonic() + STARTING
        try:
            self.said = json.loads(self.read())
        except WorkerLost:
            self.end()
            raise CourseError(f"The code sandbox does not start: {sys.executable} ended at once. Its own words stand above.") from None
        if "error" in self.said:
            self.end()
            raise CourseError(
                f"The code sandbox needs Linux on x86_64 or aarch64 with seccomp: {self.said['error']}. Train on such a machine, in the "
                "course's Docker image for instance, or on tasks without code: grpo.tasks.made.kinds=[sum]."
            )
        self.try_it()

    def try_it(self) -> None:
        """Run the program that tries what is forbidden; again if a busy machine does not come to it."""
        try:
            for _ in range(3):
                self.send(0, Call(ATTEMPTS, "succeeded", [(sys.executable, os.getpid())]))
                outcome = self.receive()[1]
                if outcome.results:
                    break
        except WorkerLost:
            outcome = Outcome("worker lost")
        if outcome.results != (("value", ["list"]),):
            self.end()
            raise CourseError(f"The code sandbox does not hold on this machine, so no program is run. A trial ended thus: {outcome}.")

    def send(self, number: int, call: Call) -> None:
        request = {"program": call.program, "function": call.function, "inputs": [[encode(value) for value in row] for row in call.inputs]}
        self.number, self.calls, self.overdue = number, len(call.inputs), time.monotonic() + self.limits.wall_seconds + GRACE
        try:
            write_message(self.process.stdin.fileno(), json.dumps(request).encode())
        except OSError as error:
            raise WorkerLost from error

    def read(self) -> bytes:
        """The next message, which a worker writes at once and whole."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, self.overdue - time.monotonic())):
                raise WorkerLost
        try:
            return read_message(self.process.stdout.fileno())
        except EOFError as error:
            raise WorkerLost from error

    def receive(self) -> tuple[int, Outcome]:
        ended, _, output = self.read().partition(b"\n")
        number, self.number = self.number, None
        return number, outcome_of(ended.decode(), output, self.calls)

    def end(self) -> None:
        """End the worker and all its children."""
        self.process.stdin.close()  # which ends it too, where it may not be killed
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def outcome_of(ended: str, output: bytes, calls: int) -> Outcome:
    """A program's outcome from how it ended and the bytes that it wrote, which may be any bytes."""
    complete = output[: output.rfind(b"\n") + 1].splitlines()
    try:
        lines = [json.loads(line, object_pairs_hook=refuse, parse_constant=refuse) for line in complete[: calls + 1]]
    except (ValueError, RecursionError):
        return Outcome("malformed")
    if len(lines) == 1 and is_line(lines[0], "failed"):
        return Outcome("failed", words=shown(lines[0][1]))
    if len(lines) > calls or not all(is_line(line, "value", "raised") for line in lines):
        return Outcome("malformed")
    if ended == "finished" and len(lines) < calls:
        ended = "quit"
    return Outcome(ended, tuple((kind, found if kind == "value" else shown(found)) for kind, found in lines))


def is_line(line: Any, *kinds: str) -> bool:
    """Whether this is [kind, words], or ["value", anything]."""
    return type(line) is list and len(line) == 2 and line[0] in kinds and (line[0] == "value" or type(line[1]) is str)


def refuse(found: Any) -> None:
    raise ValueError(f"{type(found).__name__} is no part of a result")


def shown(words: str) -> str:
    """A stranger's words, fit for a log: ASCII, one line, no control characters, not long."""
    return ascii(words[:200])[1:-1][:200]


class Pool:
    """Worker processes that run programs. For one thread of one process; a worker is started when it is first needed.

    Args:
        limits: of each program.
        workers: programs that run at a time.
        namespaces: False does without them even where the kernel has them: what a program may do is then less, and is the same everywhere.
    """

    def __init__(self, limits: Limits | None = None, workers: int = 2, namespaces: bool = True):
        if workers < 1:
            raise ValueError(f"A sandbox needs at least 1 worker, not {workers}.")
        self.limits, self.size, self.namespaces = limits or Limits(), workers, namespaces
        self.workers: list[Worker] = []
        self.owner = 0  # the process that started them: one forked from it has workers of its own

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcomes of some programs, in their order.

        Raises:
            CourseError: the sandbox does not start, or does not hold.
            TypeError: an input has no form in JSON.
        """
        most = self.limits.program_kib << 10
        outcomes: list[Outcome | None] = [Outcome("too long") if len(call.program) > most else None for call in calls]
        waiting = deque(number for number, outcome in enumerate(outcomes) if outcome is None)
        losses = Counter()

        def replace(worker: Worker) -> None:
            self.workers.remove(worker)
            worker.end()
            losses[worker.number] += 1
            if losses[worker.number] < TRIES:
                waiting.append(worker.number)
            else:
                outcomes[worker.number] = Outcome("worker lost")

        try:
            while waiting or self.busy():
                self.start(min(self.size, len(waiting) + len(self.busy())))
                for worker in [worker for worker in self.workers if worker.number is None][: len(waiting)]:
                    number = waiting.popleft()
                    try:
                        worker.send(number, calls[number])
                    except WorkerLost:
                        replace(worker)
                for worker in self.answering():
                    try:
                        number, outcome = worker.receive()
                        outcomes[number] = outcome
                    except WorkerLost:
                        replace(worker)
        except BaseException:
            self.close()  # an answer that is still under way must not meet the next program
            raise
        return outcomes

    def start(self, workers: int) -> None:
        """Have at least so many workers."""
        if self.owner != os.getpid():
            self.workers, self.owner = [], os.getpid()
        while len(self.workers) < workers:
            self.workers.append(Worker(self.limits, self.namespaces))

    def busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.number is not None]

    def answering(self) -> list[Worker]:
        """The workers that have an answer ready, or should have by now; waits for one."""
        busy = self.busy()
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(max(0.0, min(worker.overdue for worker in busy) - time.monotonic()))]
        return ready or [worker for worker in busy if worker.overdue <= time.monotonic()]

    def describe(self) -> str:
        """One line for a run's start: which isolation holds here, as tried, and the limits. Starts a worker where there is none."""
        self.start(1)
        said = self.workers[0].said
        if said["namespaces"]:
            held = "user, mount, process, network, IPC and host-name namespaces and a system-call filter; no file but those in its own /tmp"
        else:
            why = f", since this machine refuses ({said['refused']})" if "refused" in said else ""
            held = f"a system-call filter alone, without namespaces{why}; no file at all"
        return f"{self.size} workers run programs as user {said['user']} behind {held}; {self.limits}."

    def close(self) -> None:
        """End the workers. The pool may be used again."""
        while self.workers and self.owner == os.getpid():
            self.workers.pop().end()
