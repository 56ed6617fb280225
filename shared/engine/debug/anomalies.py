"""Chapter 04. Anomaly detection (NaN, loss spike): catch the batch that would break a run before it reaches the weights.

A step whose loss or gradient is not finite must not reach the optimizer: one NaN in the weights and everything since the last
checkpoint is lost. So both are checked before the optimizer steps. A finite loss far above the recent ones is caught too; "far" is measured
in median absolute deviations, which the spikes themselves do not widen as they would a standard deviation:

    loss > median + deviations * 1.4826 * MAD       (1.4826 makes the MAD of a normal distribution its standard deviation)

What is caught is kept: the micro-batches, the metrics, each micro-batch's loss, and for a step that was stopped the weights, so that
`replay` sees what the run saw.

Left out on purpose: skipping a bad batch and going on. It hides a cause that this module exists to show.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.course.errors import CourseError
from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.callbacks import Callback, Metrics, RunState
from shared.engine.trackers.jsonl import from_json, to_json
from shared.engine.checkpoint.snapshot import weights_of
from shared.loop import evaluate
from shared.output_files import writing
from shared.tensor_files import save_tensors
from shared.totals import Batch, Objective

SMALLEST_SPREAD = 0.01  # of the median: a loss that has stopped moving makes no spikes of rounding


class BrokenStep(CourseError):
    """A step that would have corrupted the weights. The message says where its batch is; `microbatch` is the first one at fault."""

    def __init__(self, sentence: str, microbatch: int):
        super().__init__(sentence)
        self.microbatch = microbatch


class CatchAnomalies(Callback):
    """Non-finite and loss-spike guard for every step: stops before a step that is not finite, and saves the batch of a loss spike.

    Everything lands in `anomalies/step-XXXXXXXX` of the run's folder, named by the step that the batch was for.

    Args:
        stop_on_nonfinite: end the run before a step whose loss or gradient norm is not finite. False saves the batch
            and continues.
        spike_deviations: how many scaled median absolute deviations above the median a spike is; 0 for no spikes.
        window: how many recent losses a loss is compared with. None is judged before a quarter of them, at least 8, are there.
        keep: how many batches a run saves at most; later ones are still reported.
        loss_scaled: whether the loss is scaled dynamically (chapter 05). Gradients overflow then now and then, by design, and the
            updater skips their step itself; a loss that is not finite is broken all the same.
    """

    every_rank = True

    def __init__(
        self,
        stop_on_nonfinite: bool = True,
        spike_deviations: float = 12.0,
        window: int = 64,
        keep: int = 10,
        loss_scaled: bool = False,
    ):
        self.stop_on_nonfinite, self.spike_deviations, self.keep, self.loss_scaled = stop_on_nonfinite, spike_deviations, keep, loss_scaled
        self.recent: deque[float] = deque(maxlen=window)
        self.saved = 0

    def before_optimizer(self, engine: RunState) -> None:
        """Raise `BrokenStep` if loss or gradient norm is not finite; its message says where the batch is and how to replay it."""
        if not (metrics := self.loss_and_norm(engine)):
            return
        loss = metrics["train/loss"]
        broken = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if broken and self.stop_on_nonfinite:
            self.stop(engine, broken[0], metrics)
        if broken:
            self.report(engine, broken[0], metrics)
            return
        limit = self.limit()
        if loss > limit:
            self.report(engine, f"loss spike, {loss:.3f} where at most {limit:.3f} was to be expected", metrics | {"limit": limit})
        self.recent.append(loss)

    def loss_and_norm(self, engine: RunState) -> Metrics:
        """Loss and gradient norm of the mean loss. Empty for a step without valid tokens, which the updater refuses."""
        if not engine.token_count:
            return {}
        norm = {"norm/gradient": engine.grad_norm} if self.stop_on_nonfinite and not self.loss_scaled else {}
        return {"train/loss": engine.loss} | norm

    def limit(self) -> float:
        """The threshold of a loss spike; infinite while too few losses are known."""
        if not self.spike_deviations or len(self.recent) < max(8, self.recent.maxlen // 4):
            return math.inf
        median = statistics.median(self.recent)
        deviation = statistics.median(abs(loss - median) for loss in self.recent)
        return median + self.spike_deviations * max(1.4826 * deviation, SMALLEST_SPREAD * abs(median))

    def stop(self, engine: RunState, reason: str, metrics: Metrics) -> None:
        folder = self.folder(engine)
        losses, problem = save_anomaly(folder, engine, reason, metrics, engine.strategy.full_weights())
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        where = f"micro-batch {', '.join(map(str, bad))} of 0 to {len(losses) - 1}" if bad else "every micro-batch's loss is finite"
        kept = f"{folder}: `replay(folder, model, objective)` of shared.engine.debug.anomalies computes its losses again."
        raise BrokenStep(
            f"Step {engine.step + 1} was stopped before it reached the weights: {reason} ({where}). "
            + (problem or f"Its batch and the weights are in {kept}"),
            microbatch=bad[0] if bad else 0,
        )

    def report(self, engine: RunState, reason: str, metrics: Metrics) -> None:
        """Save the batch, up to `keep` of them, and report the anomaly; the run continues."""
        told = f"Step {engine.step + 1}: {reason}."
        if self.saved < self.keep:
            self.saved += 1
            _, problem = save_anomaly(self.folder(engine), engine, reason, metrics, {})
            told += f" {problem}" if problem else f" Its batch is in {self.folder(engine)}."
        engine.console.print(told, markup=False, highlight=False, soft_wrap=True)

    def folder(self, engine: RunState) -> Path:
        rank = engine.strategy.rank  # each writes its own micro-batches
        name = f"step-{engine.step + 1:08d}" + (f"-rank-{rank}" if rank else "")
        return engine.output / "anomalies" / name

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "saved": self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent.clear()
        self.recent.extend(state["recent"])
        self.saved = state["saved"]


def microbatch_losses(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> list[float]:
    """Nats per token of each micro-batch (0 where no token counts), without dropout and without touching gradients or generators."""
    totals = [evaluate(model, [batch], objective) for batch in microbatches]
    return [each.mean_loss if each.token_count else 0.0 for each in totals]


def save_anomaly(
    folder: Path, engine: RunState, reason: str, metrics: Metrics, weights: dict[str, Tensor]
) -> tuple[list[float], str]:
    """Write a step's micro-batches and their metrics. Returns each micro-batch's loss, and an error message if the disk is full.

    `batch.safetensors` holds tensor `<name>` of micro-batch i as `<i>.<name>`; `anomaly.json` the step, the reason, the metrics
    and the losses; `weights.safetensors`, if any are given, the weights as `shared.engine.checkpoint.snapshot.weights_of` names them.
    """
    losses = microbatch_losses(engine.model, engine.microbatches, engine.objective)
    record = to_json({"step": engine.step + 1, "reason": reason, "metrics": metrics, "losses": losses})
    batches = enumerate(engine.microbatches)  # copied, because safetensors refuses tensors that are views of one another
    tensors = {f"{index}.{name}": x.clone(memory_format=torch.contiguous_format) for index, batch in batches for name, x in batch.items()}

    def write(partial: Path) -> None:
        (partial / "anomaly.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        save_tensors(tensors, partial / "batch.safetensors")
        if weights:
            save_tensors({name: weight.contiguous() for name, weight in weights.items()}, partial / "weights.safetensors")

    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            atomic_save(folder, write)
    except CourseError as error:  # what was found matters more than its files
        return losses, str(error)
    return losses, ""


def read_anomaly(folder: Path | str) -> dict[str, Any]:
    """The content of `anomaly.json`: `step`, `reason`, `metrics`, `losses`."""
    path = Path(folder) / "anomaly.json"
    if not path.is_file():
        raise CourseError(f"{folder} holds no saved anomaly: give a folder anomalies/step-XXXXXXXX of a run.")
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise CourseError(f"{path} is damaged ({error}): give another saved anomaly.") from None


def saved_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CourseError(f"{path} is damaged ({error}): give another saved anomaly.") from None


def load_batch(folder: Path | str, device: torch.device | str = "cpu") -> list[Batch]:
    """The saved micro-batches, in their order."""
    microbatches: dict[int, Batch] = {}
    for key, tensor in saved_tensors(Path(folder) / "batch.safetensors", device).items():
        index, _, name = key.partition(".")
        microbatches.setdefault(int(index), {})[name] = tensor
    return [microbatches[index] for index in sorted(microbatches)]


def replay(folder: Path | str, model: nn.Module, objective: Objective, *, saved_weights: bool = True) -> list[float]:
    """Compute the losses of a saved batch again, to find what is wrong with it.

    Args:
        folder: one that `CatchAnomalies` made.
        model: of the run's configuration. Where weights were saved, they are copied into it, unless `saved_weights` is False:
            then its own stay, and the answer says whether another model meets the same trouble.
        objective: the run's.

    Returns:
        Each micro-batch's loss, nats per token, in evaluation mode: with the saved weights those in `anomaly.json`.
    """
    read_anomaly(folder)
    weights = Path(folder) / "weights.safetensors"
    if saved_weights and weights.is_file():
        put_weights(model, saved_tensors(weights))
    device = next(model.parameters()).device
    return microbatch_losses(model, load_batch(folder, device), objective)


@torch.no_grad()
def put_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    own = weights_of(model, everything=True)
    differing = sorted(set(own) ^ set(saved)) or sorted(name for name in own if own[name].shape != saved[name].shape)
    if differing:
        names = ", ".join(differing[:5])
        raise CourseError(f"The saved weights are another model's: {names} differ. Make the model from the run's configuration.")
    for name, weight in own.items():
        weight.copy_(saved[name])
