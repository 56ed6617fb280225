"""Chapter 06. Starting ranks as processes from a notebook cell, a test or a script, in a fraction of a second.

    results = run_processes(lambda world: world.gather_objects(world.rank), 2)

A new Python that imports torch takes seconds, and a fork of a process that has used autograd hangs. So ranks are forked from a server
that has imported torch and done nothing else, and the function is sent to them by cloudpickle, which takes one that was defined in a
cell. They meet in a file, and their gloo talks through the loopback device only. A script that calls this needs
`if __name__ == "__main__":`, because ranks import it.

Left out on purpose: several machines. That is torchrun's work, and `shared.parallel.comm.processes.from_torchrun` takes it from there.
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
from shared.parallel.health.heartbeat import EXIT_CODE, Timeouts, RankLost
from shared.parallel.comm.processes import join_world, leave_world

Result = TypeVar("Result")
BRIEF = Timeouts(heartbeat_timeout=60.0, collective_timeout=1800.0, heartbeat_interval=0.2)
GRACE = 0.2  # seconds that the other ranks have, after one has failed, to tell what they failed with
CAUSE = 60.0  # ... where that one failed because of another, which has yet to send why: its machine may be busy


class RankFailed(Exception):
    """What a rank raised, where the exception itself could not be sent; the message has its type and its text."""


@dataclass
class Job:
    """What a rank is to do."""

    call: bytes  # the function and its arguments
    rank: int
    ranks: int
    folder: Path
    timeouts: Timeouts
    choice: binding.Choice  # whose exercises the core runs with


def run_processes(
    function: Callable[..., Result], ranks: int, *arguments: Any, timeout: float = 180.0, timeouts: Timeouts = BRIEF
) -> list[Result]:
    """Run `function(world, *arguments)` in each of `ranks` new processes, and return the results in rank order.

    `world` is the rank's `ProcessCommunicator`, on the CPU with one thread. What ranks print comes out here, when all have ended, rank
    after rank. No process is left, whatever happens.

    Args:
        timeout: seconds for the whole call. timeouts: how long ranks wait for each other within it.

    Raises:
        CommunicationError: a rank ended its process, the time is over, or the ranks' calls do not match.
        Exception: what the first rank that failed raised, with a note that holds the rank and its traceback there.
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
    """Each rank's answer as it comes, until all have answered, the deadline, or shortly after the first that failed. None for a rank
    that ended without an answer; a rank that gave none yet is absent. What is there already is taken, however late this process is."""
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
                told_by_another = isinstance(error, RankStopped) and not isinstance(error, RankLost)
                deadline = min(deadline, time.monotonic() + (CAUSE if told_by_another else GRACE))
    return answers


def results_of(answers: dict[int, Any], codes: list[int], timeout: float, folder: Path) -> list[Any]:
    """The results, or the failure that says most: an exception, then a process that ended, then the time that is over."""
    ranks = len(codes)
    errors = {rank: answer[1] for rank, answer in sorted(answers.items()) if answer is not None and answer[1] is not None}
    ended = [rank for rank, answer in sorted(answers.items()) if answer is None]
    ended = [rank for rank in ended if codes[rank] != EXIT_CODE] or ended  # with that code a rank ends because of another
    for error in errors.values():
        if not isinstance(error, RankStopped):
            raise error
    if ended:
        raise CommunicationError(
            "; ".join(f"rank {rank} of {ranks} ended with {exit_name(codes[rank])}{said(rank, folder)}" for rank in ended)
        )
    if errors:
        raise next(iter(errors.values()))
    if len(answers) < ranks:
        missing = [rank for rank in range(ranks) if rank not in answers]
        raise CommunicationError(f"{names(missing)} of {ranks} did not end within {timeout:g} s, and all were stopped.")
    return [answers[rank][0] for rank in range(ranks)]


def names(ranks: list[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def exit_name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def said(rank: int, folder: Path) -> str:
    """The last lines that the process itself wrote, gloo's complaints for instance."""
    path = Path(folder, f"said-{rank}")
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return ":\n" + "\n".join(lines[-5:]) if lines else ""


def print_lines(rank: int, path: Path) -> None:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            print(f"rank {rank}: {line}")


# What follows runs in the rank's own process.


def rank_main(connection: Connection, job: Job) -> None:
    """Work, answer, and stay until the parent has all answers: a rank that left early would look to the others like one that died."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills this process
    redirect(job)
    try:
        answer = work(job), None
    except BaseException as error:
        answer = None, error
    sys.stdout.flush()
    connection.send_bytes(packed(answer, job))
    connection.poll(None)


def redirect(job: Job) -> None:
    """What Python prints goes to one file, which the parent shows; what else the process writes to another, for when it dies."""
    handle = os.open(job.folder / f"said-{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace")
    sys.stdout = open(job.folder / f"printed-{job.rank}", "w", buffering=1, encoding="utf-8")


def work(job: Job) -> Any:
    binding.choose(job.choice.implementation, job.choice.workspace, job.choice.replaced)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()  # the way in which torch takes it
    function, arguments = cloudpickle.loads(job.call)
    world = join_world(job.rank, job.ranks, f"file://{job.folder / 'meeting'}", torch.device("cpu"), job.timeouts)
    try:
        result = function(world, *arguments)
        require_finished(world)
    except BaseException as error:
        leave_world(world, f"stopped: {type(error).__name__}: {error}")
        raise
    leave_world(world, "has finished")
    return result


def loopback() -> str:
    """The name of the device that leads nowhere but back."""
    return next(name for name, addresses in psutil.net_if_addrs().items() if any(each.address == "127.0.0.1" for each in addresses))


def packed(answer: tuple[Any, BaseException | None], job: Job) -> bytes:
    """An answer as it is sent. An exception takes its traceback along, as a note."""
    result, error = answer
    if error is not None and not isinstance(error, CommunicationError):
        error.add_note(f"on rank {job.rank} of {job.ranks}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        data = cloudpickle.dumps((result, error))
        cloudpickle.loads(data)  # some exceptions can be packed and not unpacked
        return data
    except Exception as problem:
        told = error or problem
        substitute = RankFailed(f"{type(told).__name__}: {told}")
        for note in getattr(told, "__notes__", [f"on rank {job.rank} of {job.ranks}: its result cannot be sent"]):
            substitute.add_note(note)
        return cloudpickle.dumps((None, substitute))
