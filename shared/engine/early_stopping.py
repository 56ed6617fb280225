"""Chapter 04. Ending a run that has stopped improving on held-out data.

Left out on purpose: going back to the best weights. Checkpoints keep the best one (`checkpoint.keep_best`).
"""

import math
from typing import TYPE_CHECKING, Any

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Figures

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without improvement.

    Args:
        patience: how many.
        minimum_improvement: by how much a figure must fall below the best one to count, in its own unit.
        figure: what is watched; lower is better. NaN is no improvement.
    """

    def __init__(self, patience: int, minimum_improvement: float = 0.0, figure: str = "validation/loss"):
        if patience < 1 or minimum_improvement < 0:
            raise CourseError(f"patience is {patience} and minimum_improvement {minimum_improvement}: give at least 1 and at least 0.")
        self.patience, self.minimum_improvement, self.figure = patience, minimum_improvement, figure
        self.best, self.waited = math.inf, 0

    def on_start(self, engine: "RuntimeEngine") -> None:
        """A run that was stopped stays stopped when it is started again."""
        if self.waited >= self.patience:
            self.stop(engine)

    def on_evaluate(self, engine: "RuntimeEngine", figures: Figures) -> None:
        """
        Raises:
            CourseError: the figure is not among those of the evaluation.
        """
        if self.figure not in figures:
            raise CourseError(f"Early stopping watches {self.figure!r}, which no evaluation measures: choose {', '.join(figures)}.")
        if figures[self.figure] < self.best - self.minimum_improvement:
            self.best, self.waited = figures[self.figure], 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.stop(engine)

    def stop(self, engine: "RuntimeEngine") -> None:
        engine.stop(f"{self.figure} has not fallen below {self.best:.4f} in {self.waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best if math.isfinite(self.best) else None, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.waited = state["waited"]
