"""Chapter 06. Launch ranks as local processes (multiprocessing) from a notebook cell, a test or a script, in a fraction of a second.

    results = run_processes(lambda world: world.gather_objects(world.rank), 2)

A new Python that imports torch takes seconds, and a fork of a process that has used autograd hangs. So ranks are forked from a fork server
that has imported torch and done nothing else. The function is sent to them by cloudpickle, which can send one that was defined in a
notebook cell. The rendezvous is a file, and gloo uses the loopback device only. A script that calls this needs
`if __name__ == "__main__":`, because ranks import it.

Left out on purpose: several machines. torchrun starts ranks there, and `shared.parallel.processes.torchrun.from_torchrun` joins its world.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import psutil
import torch

from shared.course import binding
from shared.course.running import PRELOADED, end_with_parent
from shared.parallel.comm.communicator import CommunicationError, RankStopped, require_finished
from shared.parallel.health.heartbeat import EXIT_CODE, RankLost, Timeouts
from shared.parallel.processes.torchrun import broken_connections_named, join_world, leave_world

Result = TypeVar("Result")
LOCAL_TIMEOUTS = Timeouts(heartbeat_timeout=60.0, collective_timeout=1800.0, heartbeat_interval=0.2)
GRACE = 0.2  # seconds in which the other ranks can send their errors, after one has failed
CAUSE_GRACE = 60.0  # ... where that one failed because of another rank, whose error is the cause; the machine may be busy


class RankFailed(Exception):
    """Replaces an exception of a rank that cannot be pickled; the message has its type and its text."""


@dataclass
class Job:
    """The task of one rank."""

    call: bytes  # the function and its arguments
    rank: int
    ranks: int
    folder: Path
    timeouts: Timeouts
    choice: binding.Choice  # whose exercises the core runs with


def run_processes(
    function: Callable[..., Result], ranks: int, *arguments: Any, timeout: float = 180.0, timeouts: Timeouts = LOCAL_TIMEOUTS
) -> list[Result]:
    """Run `function(world, *arguments)` in each of `ranks` new processes, and return the results in rank order.

    `world` is the rank's `ProcessCommunicator`, on the CPU with one thread. The ranks' output is printed once all have ended, rank by rank.
    No process outlives the call.

    Args:
        timeout: seconds for the whole call. timeouts: how long ranks wait for each other.

    Raises:
        CommunicationError: a rank's process ended, `timeout` is over, or the ranks' calls do not match.
        Exception: the error of the first rank that failed, with a note that has the rank and its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    call, deadline = cloudpickle.dumps((function, arguments)), time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        started: list[tuple[Any, Connection]] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                job = Job(call, rank, ranks, Path(folder), timeouts, binding.current_choice())
                process = context.Process(target=rank_main, args=(there, job), name=f"rank {rank}")
                process.start()
                there.close()
                started.append((process, here))
            answers = collect([connection for _, connection in started], deadline)
        finally:
            for process, connection in started:
                process.kill()
                process.join()
                connection.close()
            for rank in range(ranks):
                print_lines(rank, Path(folder, f"printed-{rank}"))
        codes = [process.exitcode for process, _ in started]
        return results_of(answers, codes, timeout, Path(folder))


def collect(connections: list[Connection], deadline: float) -> dict[int, tuple[Any, BaseException | None] | None]:
    """Receive the ranks' results, until all have arrived, the deadline, or shortly after the first failure.

    Returns:
        rank -> (result, error); None for a rank whose process ended without one. Late ranks are absent. Results that have arrived are read
        even after the deadline.
    """
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        remaining = deadline - time.monotonic()
        ready = wait([connection for rank, connection in enumerate(connections) if rank not in answers], max(0.0, remaining))
        if not ready and remaining <= 0:
            break
        for connection in ready:
            rank = connections.index(connection)
            try:
                answers[rank] = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                answers[rank] = None
            if answers[rank] is None or answers[rank][1] is not None:
                error = answers[rank] and answers[rank][1]
                is_consequence = isinstance(error, RankStopped) and not isinstance(error, RankLost)
                deadline = min(deadline, time.monotonic() + (CAUSE_GRACE if is_consequence else GRACE))
    return answers


def results_of(answers: dict[int, Any], codes: list[int], timeout: float, folder: Path) -> list[Any]:
    """The ranks' results; or raise the most informative failure: an exception, else a process that ended, else the timeout."""
    ranks = len(codes)
    errors = {rank: answer[1] for rank, answer in sorted(answers.items()) if answer is not None and answer[1] is not None}
    ended = [rank for rank, answer in sorted(answers.items()) if answer is None]
    ended = [rank for rank in ended if codes[rank] != EXIT_CODE] or ended  # that code says that another rank failed
    for error in errors.values():
        if not isinstance(error, RankStopped):
            raise error
    if ended:
        raise CommunicationError(
            "; ".join(f"rank {rank} of {ranks} ended with {exit_name(codes[rank])}{stderr_of(rank, folder)}" for rank in ended)
        )
    if errors:
        raise next(iter(errors.values()))
    if len(answers) < ranks:
        missing = [rank for rank in range(ranks) if rank not in answers]
        raise CommunicationError(f"{rank_names(missing)} of {ranks} did not end within {timeout:g} s, and all were stopped.")
    return [answers[rank][0] for rank in range(ranks)]


def rank_names(ranks: list[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def exit_name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def stderr_of(rank: int, folder: Path) -> str:
    """The last lines of the process's standard error, such as errors of gloo."""
    path = Path(folder, f"stderr-{rank}")
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return ":\n" + "\n".join(lines[-5:]) if lines else ""


def print_lines(rank: int, path: Path) -> None:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            print(f"rank {rank}: {line}")


# The rest runs in the rank's own process.


def rank_main(connection: Connection, job: Job) -> None:
    """Run the job, send the result, and wait until the parent has all results: the others would take a rank that exits early for dead."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills this process
    redirect(job)
    try:
        answer = work(job), None
    except BaseException as error:
        answer = None, error
    sys.stdout.flush()
    connection.send_bytes(pickled(answer, job))
    connection.poll(None)


def redirect(job: Job) -> None:
    """Redirect Python's output to one file, which the parent prints, and everything else to another, which is shown if the process dies."""
    handle = os.open(job.folder / f"stderr-{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace")
    sys.stdout = open(job.folder / f"printed-{job.rank}", "w", buffering=1, encoding="utf-8")


def work(job: Job) -> Any:
    binding.choose(job.choice.implementation, job.choice.workspace, job.choice.replaced)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()  # torch reads it from the environment
    function, arguments = cloudpickle.loads(job.call)
    world = join_world(job.rank, job.ranks, f"file://{job.folder / 'rendezvous'}", torch.device("cpu"), job.timeouts)
    try:
        with broken_connections_named(world):
            result = function(world, *arguments)
        require_finished(world)
    except BaseException as error:
        leave_world(world, f"stopped: {type(error).__name__}: {error}")
        raise
    leave_world(world, "has finished")
    return result


def loopback() -> str:
    """The name of the loopback network device."""
    return next(name for name, addresses in psutil.net_if_addrs().items() if any(each.address == "127.0.0.1" for each in addresses))


def pickled(answer: tuple[Any, BaseException | None], job: Job) -> bytes:
    """Pickle a result or an exception, whose traceback becomes a note."""
    result, error = answer
    if error is not None and not isinstance(error, CommunicationError):
        error.add_note(f"on rank {job.rank} of {job.ranks}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        data = cloudpickle.dumps((result, error))
        cloudpickle.loads(data)  # some exceptions can be pickled and not unpickled
        return data
    except Exception as problem:
        cause = error or problem
        substitute = RankFailed(f"{type(cause).__name__}: {cause}")
        for note in getattr(cause, "__notes__", [f"on rank {job.rank} of {job.ranks}: its result cannot be sent"]):
            substitute.add_note(note)
        return cloudpickle.dumps((None, substitute))
