"""Chapter 04. Ends of a run before its last step: graceful shutdown by a signal, and early stopping on held-out data.

After the first SIGTERM (from a scheduler) or Ctrl-C (from a user) the engine says so, completes the step, saves a checkpoint and exits. A
second Ctrl-C ends the process immediately.

Left out on purpose: going back to the best weights. Checkpoints keep the best one (`checkpoint.keep_best`).
"""

import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Metrics, RunState


ASKED = "{}: the step that runs is completed and saved. Ctrl-C once more ends at once, without saving."


class ShutdownRequest:
    """Within its `with` block, SIGTERM and Ctrl-C set `reason` and do not end the process. It does nothing outside the main thread.

    Args:
        say: called with a line about what happens next, at the first signal.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None):
        self.say = say
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
        if not self.reason:
            self.say(ASKED.format(signal.Signals(number).name))
        self.reason = signal.Signals(number).name


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without improvement.

    Args:
        patience: how many.
        minimum_improvement: by how much a metric must fall below the best one to count, in its own unit.
        metric: what is watched; lower is better. NaN is no improvement.
    """

    every_rank = True

    def __init__(self, patience: int, minimum_improvement: float = 0.0, metric: str = "validation/loss"):
        if patience < 1 or minimum_improvement < 0:
            raise CourseError(f"patience is {patience} and minimum_improvement {minimum_improvement}: give at least 1 and at least 0.")
        self.patience, self.minimum_improvement, self.metric = patience, minimum_improvement, metric
        self.best, self.waited = math.inf, 0

    def on_start(self, engine: RunState) -> None:
        """A run that was stopped stays stopped when it is started again."""
        if self.waited >= self.patience:
            self.stop(engine)

    def on_evaluate(self, engine: RunState, metrics: Metrics) -> None:
        if self.metric not in metrics:
            raise CourseError(f"Early stopping watches {self.metric!r}, which no evaluation measures: choose {', '.join(metrics)}.")
        if metrics[self.metric] < self.best - self.minimum_improvement:
            self.best, self.waited = metrics[self.metric], 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.stop(engine)

    def stop(self, engine: RunState) -> None:
        engine.stop(f"{self.metric} has not fallen below {self.best:.4f} in {self.waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best if math.isfinite(self.best) else None, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.waited = state["waited"]
