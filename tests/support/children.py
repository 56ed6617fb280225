"""Work in a child of the preloaded fork server: a fresh process without the cost of one, for many answers at a time."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from typing import Any

from shared.course.running import PRELOADED


BUSY = 20  # times as long as it computes, by the clock, on a machine that does much else


class EndedItsProcess(AssertionError):
    """A function that was run in a child ended the child's process."""


def in_child(function: Callable, *arguments: Any, seconds: float) -> Any:
    """`function(*arguments)` in a child. The function is one of a module's own, its result plain data.

    Args:
        seconds: of the child's processor time. By the clock it may take `BUSY` times as long.

    Raises:
        AssertionError: it raised or took longer than `seconds`.
        EndedItsProcess: so it did.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(sender, function, arguments, seconds), daemon=True)
    child.start()
    sender.close()
    too_slow = f"{function.__name__}{arguments} took longer than {seconds} s"
    try:
        assert receiver.poll(BUSY * seconds), f"{too_slow}, {BUSY} times over by the clock."
        result, error = receiver.recv()
    except EOFError:
        child.join()
        assert child.exitcode != -signal.SIGPROF, f"{too_slow} of processor time."
        raise EndedItsProcess(f"{function.__name__} ended its process. Its arguments: {arguments}") from None
    finally:
        child.kill()
        child.join()
    assert not error, error
    return result


def answer(sender, function: Callable, arguments: tuple, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        sender.send((function(*arguments), ""))
    except Exception:
        sender.send((None, traceback.format_exc()))
