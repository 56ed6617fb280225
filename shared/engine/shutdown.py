"""Chapter 04. Graceful shutdown: SIGTERM from a scheduler or Ctrl-C from a person ends the run between two steps.

After the first signal the step is completed, and the engine saves a checkpoint and ends. A second Ctrl-C ends the process at once.
"""

import signal
import threading
from types import FrameType
from typing import Any


class ShutdownRequest:
    """Within its `with` block, SIGTERM and Ctrl-C set `reason` and do not end the process. It does nothing outside the main thread."""

    def __init__(self):
        self.reason: str | None = None  # the signal's name
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "ShutdownRequest":
        self.reason = None
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {number: signal.signal(number, self.request) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def request(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
