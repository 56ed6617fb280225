"""Chapter 04. Callbacks: how everything that is not the loop takes part in a run.

A callback is called at each event of a step, in order, and reads the engine; logging, trackers, early stopping, profiling, dumps and
learning-rate schedules are all callbacks. One that changes from step to step says so in `state_dict`, and a resumed run restores
that state. What callbacks may read of a run is a `RunState`: they are below the engine, which is one.
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shared.course.errors import CourseError

if TYPE_CHECKING:  # all that needs torch, as a tracker whose file is read does not
    import torch
    from rich.console import Console
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shared.totals import Batch, Objective, Totals


class Ranks(Protocol):
    """The distributed strategy as callbacks see it: a part of `shared.engine.strategy.Strategy`, which documents each member."""

    rank: int
    size: int
    data_size: int
    module: "nn.Module"
    grad_params: "nn.Module"
    measured: "Tensor | None"

    def norms(self, groups: "Mapping[str, Mapping[str, Tensor | None]]") -> "dict[str, Tensor]": ...

    def sum(self, totals: "Totals") -> "Totals": ...

    def gather_stages(self, metrics: Mapping[str, float]) -> dict[str, float]: ...

    def full_weights(self) -> "dict[str, Tensor]": ...


class RunState:
    """The state of a run of the engine.

    Attributes:
        strategy: the processes that train together.
        model, optimizer, objective: what is trained, and on which loss; the model is what objectives call.
        config: how the run is watched, saved and ended (`shared.engine.config.EngineConfig`). output: the run's folder.
        console: where the run speaks. device: where the model is.
        step, steps: how many are done, and how many are wanted.
        began_at, saved_at, evaluated_at: the steps at which this process began, and of the last checkpoint and evaluation; -1 for none.
        microbatches: of the step that runs. timings: seconds by phase of the last step.
        totals: of the step, reduced over ranks; None before the first one. token_count, loss: its valid tokens, and their mean loss.
        grad_norm: of the mean loss's gradient, before clipping; times the loss scale, where there is one.
        validation: totals of the last evaluation; None before the first one.
        log_due: whether the step that runs, or has just run in `on_step`, is one that is logged.
        stopped: why the run ended early; None where it did not. leaving: whether it ends because it was asked to, in any of its processes.
        saver, parts: what writes checkpoints, and name -> whatever else they keep.
    """

    strategy: Ranks
    model: "nn.Module"
    optimizer: "Optimizer"
    objective: "Objective"
    config: Any
    output: Path
    console: "Console"
    device: "torch.device"
    step: int
    steps: int
    began_at: int
    saved_at: int
    evaluated_at: int
    microbatches: "Sequence[Batch]"
    timings: dict[str, float]
    totals: "Totals | None"
    token_count: int
    loss: float
    grad_norm: float
    validation: "Totals | None"
    stopped: str | None
    saver: Any
    parts: dict[str, Any]
    log_due: bool
    leaving: bool

    def stop(self, reason: str) -> None:
        """End the run after this step, saved, with `reason` shown."""


Metrics = dict[str, float]  # name -> value; names like `train/loss`, grouped before the slash
FAILURES = "trackers.log"  # in the run's folder: the tracebacks of expendable callbacks that failed


def metric_name(text: str) -> str:
    """A metric's name that every tracker takes as it is: of letters, digits, `_`, `-`, `.` and `/`, with `_` for anything else.

    >>> metric_name("learning_rate/adamw, no decay")
    'learning_rate/adamw_no_decay'
    """
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", text)


class Callback:
    """Base class of callbacks, with empty hooks. Override those that you need; every hook gets the engine.

    In a step: on_batch, (forward, backward, reduce), before_optimizer, (step), on_step; then, when they are due, on_evaluate, on_log,
    on_save. `engine.step` counts the steps that are done, so it is one lower in on_batch and before_optimizer than in on_step.

    every_rank: whether it takes part on every rank of a distributed run, because all ranks measure or decide together; without, on rank 0
        alone, because it only shows or keeps what all know.
    expendable: whether training continues without it when it fails, as it does for trackers.
    """

    every_rank = False
    expendable = False

    def on_start(self, engine: RunState) -> None:
        """Before the first step of this process, after a resume. May raise to refuse the run."""

    def on_batch(self, engine: RunState, microbatches: "Sequence[Batch]") -> None:
        """A step's micro-batches, on the device, before the forward pass."""

    def before_optimizer(self, engine: RunState) -> None:
        """Gradients are complete (of the loss *sum*; `engine.totals.token_count` divides them), the weights still the old ones.
        Learning rates may be set here."""

    def on_step(self, engine: RunState) -> None:
        """The optimizer has stepped; `engine.totals` are the step's, reduced."""

    def on_evaluate(self, engine: RunState, metrics: Metrics) -> None:
        """Held-out data was evaluated. Callbacks may add to `metrics` before on_log shows them; `engine.stop(reason)` ends the run."""

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        """Metrics to show or keep, at `engine.step`. Callbacks that measure add to them in `measure`; those that show read them here."""

    def measure(self, engine: RunState) -> Metrics:
        """Metrics of this callback for the log that is due, by names that `metric_name` leaves as they are. Called before on_log, once for
        each."""
        return {}

    def on_save(self, engine: RunState, folder: Any) -> None:
        """A checkpoint is complete in `folder` (pathlib.Path)."""

    def on_error(self, engine: RunState, error: BaseException) -> None:
        """The run is ending with an error, Ctrl-C included, which is raised again afterwards."""

    def on_end(self, engine: RunState) -> None:
        """The run ends, well or with an error (then after on_error). Close what is open."""

    def state_dict(self) -> dict[str, Any]:
        """The callback's state for a checkpoint, in values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class Callbacks:
    """Several callbacks, called in order; `on_end` is called on all of them, even if one raises.

    An expendable one that fails is named once, and from then on only its `on_end` is called. Its state stays in the checkpoints, so that
    a resumed run takes it up again where it was.
    """

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = list(callbacks)
        self.failed: list[Callback] = []

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def tell(self, hook: str, engine: RunState, *arguments: Any) -> None:
        if hook == "on_start":
            self.failed = []
        for callback in self.callbacks:
            if callback in self.failed:
                continue
            try:
                getattr(callback, hook)(engine, *arguments)
            except Exception as error:
                if not callback.expendable:
                    raise
                self.set_aside(callback, engine, error)

    def set_aside(self, callback: Callback, engine: RunState, error: Exception) -> None:
        """Say once that training continues without an expendable callback, and why."""
        if callback in self.failed:
            return
        self.failed.append(callback)
        log = engine.output / FAILURES
        with suppress(OSError):  # the disk that is full for a tracker is full for this file
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{type(callback).__name__}, step {engine.step}\n{''.join(traceback.format_exception(error))}\n")
        with suppress(OSError):  # of a terminal that was closed
            engine.console.print(
                f"{type(callback).__name__} failed at step {engine.step} and is set aside; training continues without it: "
                f"{in_a_line(error)} (Details: {log})", style="yellow", markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
        with suppress(Exception):  # a tracker marks its run as incomplete, if it still can
            callback.on_error(engine, error)

    def measured(self, engine: RunState) -> Metrics:
        metrics: Metrics = {}
        for callback in self.callbacks:
            metrics |= callback.measure(engine)
        return metrics

    def end(self, engine: RunState) -> None:
        errors = []
        for callback in self.callbacks:
            try:
                callback.on_end(engine)
            except Exception as error:  # the others must still close what they hold
                if callback.expendable:
                    self.set_aside(callback, engine, error)
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def by_name(self) -> dict[str, Callback]:
        """Name -> callback, the names unique: the class's, with a number after the second of a kind."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            name, count = type(callback).__name__, 1
            while name in named:
                count += 1
                name = f"{type(callback).__name__}{count}"
            named[name] = callback
        return named


def in_a_line(error: Exception) -> str:
    """An exception on one line: its type and the beginning of its message; of a `CourseError` the message alone."""
    text = " ".join((str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= 300 else text[:300] + " ..."
