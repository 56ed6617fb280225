"""Chapter 04. `RuntimeEngine`: chapter 01's loop with everything around it that a long run needs.

    engine = RuntimeEngine(model, optimizer, config)
    engine.fit(train_loader, val_loader, steps=1000)

The loop is `shared.loop.train`, unchanged. The engine tells callbacks what happens, evaluates, saves, resumes, and leaves in good
order when it is asked to. What it must know of other processes it asks one `Strategy`.
"""

import math
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Text
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.batches import as_batch, as_microbatches
from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Callbacks, Metrics, RunState, metric_name
from shared.engine.checkpoint.folder import CheckpointError
from shared.engine.compiling import compile_model
from shared.engine.config import EngineConfig
from shared.engine.defaults import default_callbacks
from shared.engine.stopping import ShutdownRequest
from shared.engine.checkpoint.snapshot import Stateful
from shared.engine.checkpoint.saver import CALLBACK, remember_rates
from shared.engine.metrics.accumulator import MetricAccumulator, PhaseTimer
from shared.engine.strategy import Strategy
from shared.loop import accumulate_gradients, apply_update, evaluate, train
from shared.loss import next_token_objective
from shared.devices import on_device, pick_device
from shared.totals import Batch, Objective, Runner, Totals, Updater


class RuntimeEngine(RunState):
    """Trains a model, watched, saved and resumable.

    Args:
        model: the model, which is moved to the device; or the strategy of a model that is parallel (chapter 06).
        optimizer: over the model's parameters, or the strategy's `optim_params`.
        config: how the run is watched, saved and ended.
        objective, updater: parts of a step, as `shared.loop.train_step` takes them; the strategy completes them over ranks.
        runner: the complete one, such as `scaler.scaled(strategy.runner(accumulate_gradients))`; None for the strategy's.
        callbacks: None for those that `config` asks for (`shared.engine.defaults`). Ranks other than 0 have those with `every_rank` alone.
        parts: name -> whatever else changes from step to step and must be saved, such as a dynamic loss scale.
        console: where the engine speaks.

    Attributes: see `RunState`.
    """

    def __init__(
        self,
        model: nn.Module | Strategy,
        optimizer: Optimizer,
        config: EngineConfig | None = None,
        *,
        objective: Objective = next_token_objective,
        runner: Runner | None = None,
        updater: Updater = apply_update,
        callbacks: Sequence[Callback] | None = None,
        parts: Mapping[str, Stateful] | None = None,
        console: Console | None = None,
    ):
        self.config = config = config or EngineConfig()
        self.output: Path = config.output
        self.console, self.device = console or Console(), pick_device(config.device)
        self.strategy = model if isinstance(model, Strategy) else Strategy(model.to(self.device))
        self.model, self.optimizer = self.strategy.model, remember_rates(optimizer)
        self.timer, self.objective = PhaseTimer(self.device), self.strategy.objective(objective)
        self.runner = self.timer.timed("compute", runner or self.strategy.runner(accumulate_gradients))
        self.reducer = self.timer.timed("reduce", self.strategy.reducer)
        self.updater = self.timer.timed("update", self.strategy.updater(updater))
        if callbacks is None:
            callbacks = default_callbacks(config, self.device, getattr(self.strategy.module, "config", None))
        everything = [*self.strategy.callbacks(), *callbacks]
        self.callbacks = Callbacks([each for each in everything if each.every_rank or self.strategy.rank == 0])
        self.parts = dict(parts or {})
        self.stateful: dict[str, Stateful] = {}
        self.accumulator = MetricAccumulator()
        saving = config.checkpoint
        self.saver = self.strategy.saver(self.output / "checkpoints", saving.keep_last, saving.keep_best, saving.asynchronous)
        self.checkpoints = self.saver.checkpoints
        self.shutdown = ShutdownRequest(lambda line: self.console.print(line, highlight=False, soft_wrap=True))
        self.step, self.steps, self.evaluated_at, self.saved_at, self.began_at = 0, 0, -1, -1, -1
        self.totals: Totals | None = None
        self.token_count, self.loss, self.grad_norm = 0, math.nan, math.nan
        self.validation: Totals | None = None
        self.microbatches: Sequence[Batch] = []
        self.timings: dict[str, float] = {}
        self.stopped: str | None = None

    def fit(
        self, train_loader: Iterable[Sequence[Batch]], val_loader: Iterable[Batch] | None = None, *,
        steps: int, retune: Collection[str] = (),
    ) -> "RuntimeEngine":  # fmt: skip
        """Train until `steps` steps are done, counting those of earlier calls and of the run that is resumed: more of them extend it.

        Args:
            train_loader: yields a step's micro-batches, one batch, or a pair (x, y). Where it has `state_dict`, its position is saved.
            val_loader: held-out batches, iterated from the start at each evaluation.
            steps: of the whole run.
            retune: what a resumed run takes from here in place of its checkpoint: settings of the optimizer's groups, such as `lr`;
                `optimizer`, for another optimizer with an empty state; `loader`, for other data, which then begins at its start.

        Raises:
            CourseError: what the reader can mend, in one sentence: the folder, a checkpoint (`Saver.restore`), the data's end.
        """
        self.steps, self.val_loader, self.stopped, self.stateful = steps, val_loader, None, self.stateful_parts(train_loader)
        with self.strategy.locked(self.output, self.console) as self.lock:
            self.strategy.begin(self)
            if self.step == 0:
                self.resume(retune)
            self.began_at = self.step
            if self.config.compile:
                compile_model(self.model, self.console)
            with self.shutdown:
                try:
                    self.callbacks.tell("on_start", self)
                    if not self.stopped:
                        for _ in self.trained(train_loader):
                            self.after_step()
                            if self.stopped:
                                break
                    self.finish()
                except BaseException as error:
                    self.callbacks.tell("on_error", self, error)
                    raise
                finally:
                    self.saver.close()
                    self.callbacks.end(self)
        return self

    def stop(self, reason: str) -> None:
        """End the run after this step, saved, with `reason` shown."""
        self.stopped = self.stopped or reason

    @property
    def log_due(self) -> bool:
        """Whether the step that is under way, or just done in `on_step`, is one that is logged."""
        return self.timer.exact

    @property
    def leaving(self) -> bool:
        """Whether the run ends because it was asked to, in any of its processes."""
        return self.stopped in signal.Signals.__members__

    # A step, in its order.

    def trained(self, train_loader: Iterable[Sequence[Batch]]) -> Iterator[None]:
        """The training loop of chapter 01, from the current step. Each iteration of this generator is one step."""
        remaining = self.steps - self.step
        if remaining <= 0:
            return
        loop = train(
            self.model, self.optimizer, self.batches(train_loader), self.objective, steps=remaining, runner=self.runner,
            reducer=self.reduce, updater=self.update,
        )  # fmt: skip
        for _, self.totals in loop:
            yield

    def batches(self, train_loader: Iterable[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
        """The loader's steps, on the device, announced."""
        source = iter(train_loader)
        fetch = self.timer.timed("data", lambda: [on_device(batch, self.device) for batch in as_microbatches(next(source, []))])
        while True:
            step = self.step + 1
            self.timer.begin(exact=step % self.config.log_every == 0 or step == 1 or self.evaluation_due(step))
            self.microbatches = fetch()
            if not self.microbatches:
                self.save()
                self.note_saved(wait=True, last=True)
                raise CourseError(
                    f"The data ended after {self.step} of {self.steps} steps: give more data, more epochs, or ask for fewer steps."
                )
            self.callbacks.tell("on_batch", self, self.microbatches)
            yield self.microbatches

    def reduce(self, model: nn.Module, totals: Totals) -> Totals:
        self.totals = self.reducer(model, totals)
        return self.totals

    def update(self, model: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
        """Copy loss, count and norm from the device together, the one device synchronization of a step; the count is then on the CPU."""
        loss_sum = self.totals.loss_sum
        wide = torch.float32 if loss_sum.device.type == "mps" else torch.float64
        values = (value.to(loss_sum.device, wide) for value in (loss_sum, token_count, self.strategy.grad_norm()))
        loss, count, norm = torch.stack(list(values)).tolist()
        self.token_count, self.loss, self.grad_norm = int(count), loss / (count or math.nan), norm / (count or math.nan)
        self.callbacks.tell("before_optimizer", self)
        self.updater(model, optimizer, torch.tensor(self.token_count))

    def after_step(self) -> None:
        self.lock.require_held()
        self.step += 1
        self.timings = self.timer.take()
        self.accumulator.add(self.totals)
        self.callbacks.tell("on_step", self)
        metrics = self.evaluate() if self.evaluation_due(self.step) else {}
        if self.log_due:
            self.log(metrics)
        if self.shutdown.reason:
            self.stop(self.shutdown.reason)
        self.stopped = self.strategy.agree(self.stopped)
        every = self.config.checkpoint.every
        if (every and self.step % every == 0) or (metrics and self.config.checkpoint.keep_best and self.is_best()):
            self.save()
        self.note_saved()

    def evaluation_due(self, step: int) -> bool:
        every = self.config.evaluate_every
        return step == self.steps or bool(every and step % every == 0)

    def is_best(self) -> bool:
        """Whether the evaluation just made is better than every one that is saved."""
        self.note_saved(wait=True)
        return self.saver.is_best(self.validation.mean_loss)

    def finish(self) -> None:
        """The last evaluation, the last log and the last checkpoint, which must succeed; of steps that this call made."""
        trained = self.step > self.began_at
        if trained and not self.leaving and self.val_loader is not None and self.evaluated_at != self.step:
            self.log(self.evaluate())
        if trained and self.saved_at != self.step:
            self.save()
        self.note_saved(wait=True, last=True)
        if self.stopped:
            self.console.print(f"Stopped after step {self.step} of {self.steps}: {self.stopped}.", highlight=False, soft_wrap=True)

    # What happens between steps.

    def evaluate(self) -> Metrics:
        """Held-out data, where there is any: `validation/loss` in nats per token, and the objective's metrics."""
        if self.val_loader is None:
            return {}
        batches = (on_device(as_batch(batch), self.device) for batch in self.val_loader)
        self.validation = self.strategy.sum(evaluate(self.model, batches, self.objective))
        self.evaluated_at = self.step
        means = {"loss": self.validation.mean_loss, **self.validation.mean_metrics()}
        metrics = {f"validation/{name}": value for name, value in means.items()}
        self.callbacks.tell("on_evaluate", self, metrics)
        return metrics

    def log(self, metrics: Metrics) -> None:
        """Tell the callbacks the metrics since the last log, theirs included."""
        rates = {metric_name(group.get("name", str(index))): group["lr"] for index, group in enumerate(self.optimizer.param_groups)}
        rates = {f"learning_rate/{name}" if len(rates) > 1 else "learning_rate": float(rate) for name, rate in rates.items()}
        means = {f"train/{name}": value for name, value in self.accumulator.take().items()}
        self.callbacks.tell("on_log", self, means | rates | self.callbacks.measured(self) | metrics)

    def stateful_parts(self, train_loader: Any) -> dict[str, Stateful]:
        """The other parts of a checkpoint, besides weights, optimizer and random state, by name."""
        parts: dict[str, Stateful] = {CALLBACK + name: callback for name, callback in self.callbacks.by_name().items()}
        if hasattr(train_loader, "state_dict"):
            parts["loader"] = train_loader
        return parts | {"window": self.accumulator} | self.parts

    def resume(self, retune: Collection[str] = ()) -> None:
        """Resume from the newest intact checkpoint, if there is one."""
        if not self.config.checkpoint.resume:
            if self.checkpoints.steps():
                raise CourseError(
                    f"{self.checkpoints.folder} holds checkpoints of another run: choose another output folder, or set checkpoint.resume."
                )
            return
        step, damaged = self.saver.restore(self.optimizer, self.stateful, retune)
        for sentence in damaged:
            self.console.print(Text(f"{sentence} Resuming from the one before it.", "yellow"), soft_wrap=True)
        if step is not None:
            self.step = self.saved_at = step
            sentences = [f"Going on from step {step}, saved in {self.checkpoints.path(step)}.", *self.saver.retuned]
            self.console.print(Text("\n".join(sentences)), soft_wrap=True)

    def save(self) -> None:
        """Save a checkpoint between two steps. Callbacks are called when it is complete."""
        self.note_saved(wait=True)
        notes: dict[str, Any] = {"steps": self.steps}
        if self.validation is not None and self.evaluated_at == self.step:
            notes["validation_loss"] = self.validation.mean_loss
        self.saver.save(self.step, self.optimizer, self.stateful, notes)
        self.saved_at = self.step

    def note_saved(self, wait: bool = False, last: bool = False) -> None:
        """Tell the callbacks of a checkpoint that was completed. One that failed is shown; the last one must not fail."""
        try:
            folder = self.saver.finished(wait)
        except CheckpointError as error:
            self.saved_at = -1
            if last:
                raise
            self.console.print(Text(f"{error} Training continues; the next checkpoint will be tried.", "red"), soft_wrap=True)
            return
        if folder is not None:
            self.callbacks.tell("on_save", self, folder)
