"""Chapter 04. Trackers: where a run's metrics go. Each is a callback; all are given the same metrics.

A resumed run continues in the same place and never shows a step twice with other values. A file can forget: what was written
after the step from which the run resumes is cut. A service cannot: there the first value of a step stays.
"""

import difflib
from typing import Any

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.trackers.console import ConsoleTracker
from shared.engine.trackers.jsonl import JsonlTracker
from shared.engine.trackers.services import MlflowTracker, TensorBoardTracker, WandbTracker

TRACKERS: dict[str, type[Callback]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def make_tracker(name: str, **options: Any) -> Callback:
    """A tracker by the name that a configuration gives it.

    Args:
        name: console, jsonl, tensorboard, wandb or mlflow.
        options: that tracker's own arguments.
    """
    if name not in TRACKERS:
        nearest = difflib.get_close_matches(name, TRACKERS, n=1)
        offered = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise CourseError(f"There is no tracker {name!r}: choose {', '.join(TRACKERS)}.{offered}")
    try:
        return TRACKERS[name](**options)
    except TypeError as error:
        raise CourseError(f"The tracker {name!r} cannot be made with the options {', '.join(options)}: {error}.") from None
