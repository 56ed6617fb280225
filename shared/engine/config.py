"""Chapter 04. Configuration of the engine: logging, evaluation, checkpoints, anomaly detection, dumps and profiling."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from shared.course.bounds import Bounds, NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from shared.course.extensions import Extension

Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]  # the keys of `shared.engine.trackers.TRACKERS`


@dataclass
@checked
class CheckpointConfig:
    """When checkpoints are saved, and which are kept.

    Args:
        every: steps between two checkpoints; 0 saves only at the end and on a shutdown request.
        keep_last: how many of the newest checkpoints are kept.
        keep_best: also keep the checkpoint with the lowest validation loss.
        asynchronous: copy the state, and write it on a thread while training continues.
        resume: resume from the newest intact checkpoint in the output folder; false refuses a folder that has one.
    """

    every: NonNegativeInt = 100
    keep_last: PositiveInt = 2
    keep_best: bool = True
    asynchronous: bool = True
    resume: bool = True


@dataclass
@checked
class AnomalyConfig:
    """Detection of NaN, inf and loss spikes. The batch of such a step is saved for replay.

    Args:
        stop_on_nonfinite: end the run, before the optimizer steps, where a loss or a gradient is inf or NaN.
        spike_deviations: a loss this many deviations above the median of the last losses is a spike; 0 for no detection.
        window: how many of the last losses the median is taken of.
    """

    stop_on_nonfinite: bool = True
    spike_deviations: NonNegativeFloat = 12.0
    window: Annotated[int, Bounds(ge=8)] = 64


@dataclass
@checked
class DumpConfig:
    """When weights, gradients and activations are dumped by name, with statistics and histograms.

    Args:
        every: steps between two dumps; 0 for none. Creating the file `dump-now` in the output folder requests one at any time.
        on_anomaly: dump when an anomaly is detected.
    """

    every: NonNegativeInt = 0
    on_anomaly: bool = True


@dataclass
@checked
class ProfileConfig:
    """Which steps torch.profiler traces; a trace opens in Perfetto.

    Args:
        first_step: the first profiled step; 0 for none. Skip a few: the first steps are slower than the others.
        steps: how many steps are profiled.
    """

    first_step: NonNegativeInt = 0
    steps: PositiveInt = 3


@dataclass
@checked
class EngineConfig:
    """Options of the training engine.

    Args:
        output: the run's folder: checkpoints, logs, dumps, anomalies, traces.
        device: where to run; auto takes a GPU where there is one.
        compile: run torch.compile on the model, or on each block of a fully sharded model; it takes half a minute at the start, and needs
            a C++ compiler.
        log_every: steps between two logs.
        evaluate_every: steps between two evaluations on validation data; 0 for one at the end only.
        early_stopping: end the run after this many evaluations without improvement; 0 for never.
        callbacks: callbacks of your own by import path, such as [my_module.MyCallback] or [{name: my_module.MyCallback, options:
            {every: 5}}]. They are called after the measuring ones and before the trackers.
        trackers: where metrics are logged: console, jsonl, tensorboard, wandb, mlflow.
        project: the project of W&B and the experiment of MLflow.
        wandb_mode: offline keeps W&B's files in the output folder, to be sent with `wandb sync`.
        mlflow_uri: MLflow's store; null for a database in the output folder.
        checkpoint: when checkpoints are saved.
        anomalies: detection of NaN, inf and loss spikes.
        dump: when weights, gradients and activations are dumped.
        profile: which steps are profiled.
    """

    output: Path = Path("runs/engine")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: bool = False
    log_every: PositiveInt = 10
    evaluate_every: NonNegativeInt = 100
    early_stopping: NonNegativeInt = 0
    callbacks: list[Extension] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=lambda: ["console", "jsonl"])
    project: str = "train-language-models"
    wandb_mode: Literal["offline", "online"] = "offline"
    mlflow_uri: str | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self):
        self.output = Path(self.output).expanduser()
        require(
            not self.early_stopping or self.evaluate_every > 0,
            "early_stopping counts evaluations, and evaluate_every is 0: there is only one, at the end. Give evaluate_every.",
        )


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)
