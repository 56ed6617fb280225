"""Chapter 04. What a run of the engine can be told, typed and checked before anything starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass
class CheckpointConfig:
    """When the run is saved, and what is kept.

    Args:
        every: steps between two checkpoints; 0 saves only at the end and on an interruption.
        keep_last: how many of the newest are kept.
        keep_best: also keep the one with the lowest validation loss.
        asynchronous: write on a thread while training goes on; the state is copied first.
        resume: go on from the newest good checkpoint in the output folder; false refuses a folder that holds one.
    """

    every: int = 100
    keep_last: int = 2
    keep_best: bool = True
    asynchronous: bool = True
    resume: bool = True

    def __post_init__(self):
        require(self.every >= 0, f"checkpoint.every is {self.every}: give steps, or 0 to save only at the end.")
        require(self.keep_last >= 1, f"checkpoint.keep_last is {self.keep_last}: keep at least 1, or a damaged one leaves nothing.")


@dataclass
class AnomalyConfig:
    """What counts as a broken step. Its batch is saved for replay.

    Args:
        stop_on_nonfinite: end the run, before the optimizer steps, where a loss or a gradient is inf or NaN.
        spike_deviations: how many deviations above the last losses' median a loss is called a spike; 0 for none.
        window: how many of the last losses that is judged by.
    """

    stop_on_nonfinite: bool = True
    spike_deviations: float = 12.0
    window: int = 64

    def __post_init__(self):
        require(self.spike_deviations >= 0, f"anomalies.spike_deviations is {self.spike_deviations}: give at least 0.")
        require(self.window >= 8, f"anomalies.window is {self.window}: give at least 8 losses to judge by.")


@dataclass
class DumpConfig:
    """When weights, gradients and activations are written down by name, with statistics and histograms.

    Args:
        every: steps between two dumps; 0 for none. The file `dump-now` in the output folder asks for one at any time.
        on_anomaly: dump when a step was caught as broken.
    """

    every: int = 0
    on_anomaly: bool = True

    def __post_init__(self):
        require(self.every >= 0, f"dump.every is {self.every}: give steps, or 0 for none.")


@dataclass
class ProfileConfig:
    """Which steps are profiled into a trace that opens in Perfetto.

    Args:
        first_step: the first one; 0 for none. Leave a few before it: the first steps are not like the others.
        steps: how many.
    """

    first_step: int = 0
    steps: int = 3

    def __post_init__(self):
        require(self.first_step >= 0 and self.steps >= 1, "profile.first_step must be at least 0, and profile.steps at least 1.")


@dataclass
class EngineConfig:
    """How a run is watched, saved and ended.

    Args:
        output: the run's folder: checkpoints, logs, dumps, anomalies, traces.
        device: where to run; auto takes a GPU where there is one.
        compile: let torch.compile translate the model, or each block of one that is fully sharded; costs half a minute at the start, and
            needs a C++ compiler.
        log_every: steps between two logs.
        evaluate_every: steps between two evaluations on held-out data; 0 for one at the end only.
        early_stopping: end the run after this many evaluations without improvement; 0 for never.
        trackers: where the metrics go: console, jsonl, tensorboard, wandb, mlflow.
        project: the name under which W&B and MLflow file the run.
        wandb_mode: offline keeps W&B's files in the output folder, to be sent with `wandb sync`.
        mlflow_uri: MLflow's store; null for a database in the output folder.
        checkpoint: when the run is saved.
        anomalies: what counts as a broken step.
        dump: when the model's insides are written down.
        profile: which steps are profiled.
    """

    output: Path = Path("runs/engine")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: bool = False
    log_every: int = 10
    evaluate_every: int = 100
    early_stopping: int = 0
    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl"])
    project: str = "train-language-models"
    wandb_mode: Literal["offline", "online"] = "offline"
    mlflow_uri: str | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self):
        self.output = Path(self.output).expanduser()
        require(self.log_every >= 1, f"log_every is {self.log_every}: give at least 1 step.")
        require(self.evaluate_every >= 0, f"evaluate_every is {self.evaluate_every}: give steps, or 0 for one at the end.")
        require(self.early_stopping >= 0, f"early_stopping is {self.early_stopping}: give evaluations, or 0 for never.")
        require(
            not self.early_stopping or self.evaluate_every > 0,
            "early_stopping counts evaluations, and evaluate_every is 0: there is only one, at the end. Give evaluate_every.",
        )


def require(condition: bool, sentence: str) -> None:
    """Refuse a configuration with a sentence."""
    if not condition:
        raise ValueError(sentence)
