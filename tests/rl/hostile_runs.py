"""The table of hostile programs, and a run of it through one worker of the sandbox."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.rl.code_reward import CodeReward, CodeTask, reward_of
from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.pool import Call

TABLE = Path(__file__).with_name("hostile_programs.toml")
LIMITS = Limits(cpu_seconds=0.2, wall_seconds=60.0)  # on a busy machine too, what computes is to end by its CPU time
WAITING = Limits(wall_seconds=1.0)  # for programs that wait
TASK = CodeTask("solve", (((2, 3), 5), ((1_000_000_007, 5), 1_000_000_012)))
HONEST = "def solve(a, b):\n    return a + b\n"
PRELUDE = '''
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def posix(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result

def syscall(x86_64, aarch64, *arguments):
    return posix(libc.syscall(x86_64 if os.uname().machine == "x86_64" else aarch64, *arguments))

# EPERM, ENOENT, EAGAIN, ENOMEM, EACCES, EFBIG, ENOSPC, EROFS. Any other error is one of the attempt's own.
REFUSALS = (1, 2, 11, 12, 13, 27, 28, 30)

def solve(a, b):
    try:
ATTEMPT
    except OSError as error:
        if error.errno in REFUSALS: return a + b
        raise
    except (RuntimeError, ValueError) as error:
        if "start new thread" in str(error) or "not allowed to raise" in str(error): return a + b
        raise
    return "done"
'''


@dataclass(frozen=True)
class Hostile:
    """One program of the table; `verdicts`: those that it may have."""

    group: str
    name: str
    text: str
    is_attempt: bool
    control: bool
    verdicts: tuple[str, ...]

    def source(self, world: "World") -> str:
        text = PRELUDE.replace("ATTEMPT", textwrap.indent(self.text.strip("\n"), " " * 8)) if self.is_attempt else self.text
        return world.names() + text if self.is_attempt or "FOLDER" in text else text


def hostile_programs() -> list[Hostile]:
    found = []
    for group, entries in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        for entry in entries:
            known = {"name", "attempt", "program", "verdict", "control", "repeat"}
            assert set(entry) <= known and ("attempt" in entry) != ("program" in entry), entry
            is_attempt, verdict = "attempt" in entry, entry["verdict"]
            text = entry["attempt" if is_attempt else "program"] * entry.get("repeat", 1)
            verdicts = (verdict,) if isinstance(verdict, str) else tuple(verdict)
            found.append(Hostile(group, entry["name"], text, is_attempt, is_attempt and entry.get("control", True), verdicts))
    return found


@dataclass
class World:
    """What a hostile program could harm: a file with the expected values, a folder, a port, two processes."""

    secret: Path
    folder: Path
    listener: socket.socket
    worker: int

    def names(self) -> str:
        values = {"PARENT": os.getpid(), "WORKER": self.worker, "SECRET": str(self.secret), "FOLDER": str(self.folder)}
        values["PORT"] = self.listener.getsockname()[1]
        return "".join(f"{name} = {value!r}\n" for name, value in values.items())

    def harm(self) -> list[str]:
        """What a program has harmed."""
        found = []
        if not self.secret.exists() or self.secret.read_text() != "[5, 1000000012]" or self.secret.stat().st_mode & 0o777 != 0o666:
            found.append("the file with the expected values")
        if list(self.folder.iterdir()):
            found.append("the folder")
        try:
            self.listener.accept()
            found.append("the port")
        except BlockingIOError:
            pass
        return found


@contextmanager
def a_world(worker: int = 0) -> Iterator[World]:
    """Files that anybody may read and change stand where anybody may go; only the sandbox is between them and a program."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    place.chmod(0o777)
    secret, folder = place / "secret", place / "folder"
    secret.write_text("[5, 1000000012]")
    secret.chmod(0o666)
    folder.mkdir()
    folder.chmod(0o777)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            yield World(secret, folder, listener, worker)
    finally:
        shutil.rmtree(place)


def judge(reward: CodeReward, hostile: Hostile, source: str) -> tuple[str, float]:
    """A program's verdict and reward."""
    call = Call(source, TASK.function, [inputs for inputs, _ in TASK.cases])
    outcome = reward.pool.run([call])[0]
    value = reward_of(outcome, TASK, share=False)
    raised = [found for kind, found in outcome.results if kind == "raised"]
    if value:
        verdict = "refused" if hostile.is_attempt else "right"
    elif outcome.ended == "failed":
        verdict = "failed" if outcome.words.startswith("there is no") else "failed " + outcome.words.partition(":")[0]
    elif outcome.ended != "finished":
        verdict = outcome.ended
    else:
        verdict = "raised " + raised[0].partition(":")[0] if raised else "wrong"
    return verdict, value


@dataclass(frozen=True)
class Tried:
    """A program's verdict and reward, the honest program's reward after it by the same worker, and what was harmed."""

    verdict: str
    reward: float
    honest: float
    harm: tuple[str, ...]


def try_all(programs: list[Hostile], namespaces: bool) -> list[Tried]:
    """Every program through one worker, or through another if it is to wait until it is ended; each is followed by an honest one."""
    found = []
    with closing(CodeReward(1, LIMITS, namespaces)) as computing, closing(CodeReward(1, WAITING, namespaces)) as waiting:
        for reward in (computing, waiting):
            reward.describe()
        workers = {reward: reward.pool.workers[0].process.pid for reward in (computing, waiting)}
        with a_world(workers[computing]) as world:
            for hostile in programs:
                reward = waiting if "wall time" in hostile.verdicts else computing
                verdict, value = judge(reward, hostile, hostile.source(world))
                honest, harm = reward(HONEST, TASK), world.harm()
                if reward.pool.workers[0].process.pid != workers[reward]:
                    harm.append("the worker")
                found.append(Tried(verdict, value, honest, tuple(harm)))
        for worker in workers.values():
            assert not left_over(worker)
    return found


def left_over(worker: int, seconds: float = 30.0) -> list[psutil.Process]:
    """The processes below a worker that are still there after a while: a keeper's last moments do not count."""
    deadline = time.monotonic() + seconds
    while (found := psutil.Process(worker).children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def outside(hostile: Hostile) -> str:
    """What an attempt gives in a plain Python, without a sandbox."""
    with a_world() as world:
        script = hostile.source(world) + "\nprint(solve(2, 3), flush=True)\n"
        with tempfile.TemporaryFile() as third:
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, pass_fds=[third.fileno()], timeout=60)
    return done.stdout.strip() or done.stderr.strip()[-300:]
