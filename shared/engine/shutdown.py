"""Chapter 04. Being asked to leave: SIGTERM from a scheduler, Ctrl-C from a person.

The first request lets the step end, so that the run can be saved between two steps. A second Ctrl-C ends it at once.
"""

import signal
import threading
from types import FrameType
from typing import Any


class ShutdownRequest:
    """While it is entered, SIGTERM and Ctrl-C set `asked` instead of ending the process. On other threads it does nothing."""

    def __init__(self):
        self.reason: str | None = None  # the signal's name
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "ShutdownRequest":
        self.reason = None
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
