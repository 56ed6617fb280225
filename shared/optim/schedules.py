"""Chapter 05. Learning rate schedules (a scheduler: warm-up; constant, linear, cosine or WSD): from the step's number to a factor.

A warm-up starts small, because the first gradients say little about the following ones and AdamW's running means are empty. A decay
ends small, because a large step around a minimum cannot settle in it. The factor multiplies each group's own learning rate, and is 1 at
the peak between the two.

In a run the rate is a function of the engine's step count, which is in the checkpoint, so the schedule itself has no state to save. The
engine logs every group's rate.

Left out on purpose: schedules that react to the loss.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shared.course.binding import exercise
from shared.course.errors import CourseError
from shared.course.extensions import bound, is_import_path
from shared.engine.callbacks import Callback, RunState
from shared.optim.config import ScheduleConfig


@exercise("05.learning_rate_factor")
def learning_rate_factor(step: int, name: str, warmup_steps: int, steps: int, decay_steps: int, minimum: float) -> float:
    """What a step's learning rate is multiplied by.

    Warm-up: factor step / warmup_steps until it is 1 at step `warmup_steps`. Without warm-up steps there is none.
    Afterwards:
        constant: 1, forever.
        linear, cosine: a decay over all steps that are left.
        wsd (warm-up, stable, decay): 1 until the last `decay_steps` steps, and a decay over those.
    A decay over n steps ends at `minimum` in the step after the last, so that even with minimum 0 every step trains. In its i-th step the
    part p = i / (n + 1) of the way is done, and the factor is minimum + (1 - minimum) * left, with
        left = 1 - p (linear),  (1 + cos(pi p)) / 2 (cosine; Loshchilov and Hutter 2017, equation 5),
        1 - sqrt(p) (wsd; Hägele et al. 2024, equation 1).
    Steps behind the last one stay at the minimum.

    Args:
        step: the number of the step, from 1.
        name: see above.
        warmup_steps: 0 or more.
        steps: of the whole run, which warm-up and decay fit into.
        decay_steps: of wsd; the others do not read it.
        minimum: the factor that a decay ends at; constant does not read it.

    >>> [learning_rate_factor(step, "linear", 2, 5, 0, 0.0) for step in range(1, 8)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    >>> [learning_rate_factor(step, "wsd", 2, 8, 3, 0.0) for step in range(1, 10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.2928932188134524, 0.1339745962155614, 0.0]
    """


def factor_at(schedule: ScheduleConfig, step: int) -> float:
    """The factor of a schedule's learning rate at a step; steps count from 1."""
    if is_import_path(schedule.name):
        factor = own_schedule(schedule)(step)
        if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
            raise CourseError(f"schedule.name: {schedule.name} returned {factor!r} for step {step}: it must return a number of at least 0.")
        return factor
    return learning_rate_factor(
        step, schedule.name, schedule.warmup_steps, schedule.steps, schedule.decay_steps, schedule.minimum
    )


def own_schedule(schedule: ScheduleConfig) -> Callable[[int], float]:
    """The function of a schedule by import path, with its arguments. Raises SettingError where it is none, or takes others."""
    offered = {name: getattr(schedule, name) for name in ("steps", "warmup_steps", "decay_steps", "minimum")}
    return bound(schedule.name, schedule.options, "schedule.name", "step", offered=offered)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's learning rate to its `base_lr` times a factor. Groups keep their proportions."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def attach_schedule(schedule: ScheduleConfig, optimizer: Optimizer) -> None:
    """Attach a learning-rate schedule to an optimizer: each call of `step` sets the learning rate first, and the first call is step 1.

    For loops that never resume. A run of the engine may resume, so it uses the engine's step count (`ScheduleLearningRate`).
    """
    steps = 0

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        set_learning_rate(optimizer, factor_at(schedule, steps))

    optimizer.register_step_pre_hook(before_step)


class ScheduleLearningRate(Callback):
    """Applies the learning-rate schedule: before each step, sets every group's `lr` from its `base_lr`."""

    every_rank = True

    def __init__(self, schedule: ScheduleConfig):
        self.schedule = schedule

    def on_start(self, engine: RunState) -> None:
        for group in engine.optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])

    def before_optimizer(self, engine: RunState) -> None:
        set_learning_rate(engine.optimizer, factor_at(self.schedule, engine.step + 1))
