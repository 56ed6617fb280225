"""Chapter 03. Prefetching in a thread: while the model computes, the next batches are made.

An error in the thread is raised where the values are consumed, and ending the consumption, by `break` or by an error, stops the
thread.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


def prefetch(values: Iterable[Value], count: int) -> Iterator[Value]:
    """The same values, of which up to `count` are made before they are asked for. With 0, no thread is started."""
    if count == 0:
        yield from values
        return
    made: queue.Queue = queue.Queue(maxsize=count)
    stop = threading.Event()

    def offer(entry: tuple) -> bool:
        while not stop.is_set():
            try:
                made.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for value in values:
                if not offer((value, None)):
                    return
            offer((None, StopIteration()))
        except BaseException as error:  # whatever it is, the consumer must hear of it
            offer((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value
    finally:
        stop.set()
        thread.join()
