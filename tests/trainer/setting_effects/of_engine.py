"""Settings of the engine: the files, the logs and the end of a short run that spikes once, and what its callbacks are made with."""

import io
import math
import re
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from runs import Loader, held_out
from torch import nn

from chapters.byte_models import ByteModel
from setting_effects.effects import Differs, Effects, called_functions
from shared.course.errors import CourseError
from shared.course.extensions import Extension
from shared.engine import defaults, engine
from shared.engine.callbacks import Callback
from shared.engine.config import AnomalyConfig, CheckpointConfig, DumpConfig, EngineConfig, ProfileConfig
from shared.engine.engine import RuntimeEngine
from shared.loss import next_token_objective
from shared.totals import Batch, Totals

STEPS, SPIKE = 20, 12


class Marked(Callback):
    """A callback by import path."""

    def on_start(self, engine: RuntimeEngine) -> None:
        engine.console.print("marked")


class Run:
    """What a run leaves: file names without time stamps and host names, its output, and how it ended.

    at: what happens to the loss of the one step that is another.
    """

    def __init__(self, steps: int = STEPS, at: float = 1.0, lr: float = 1.0):
        self.steps, self.at, self.lr = steps, at, lr

    def __call__(self, config: EngineConfig, fits: int = 1) -> list:
        with TemporaryDirectory() as folder, patch.object(defaults, "known_peak", lambda device, dtype: None):
            with chdir(folder):
                ends = [self.end(replace(config, device="cpu")) for _ in range(fits)]
            output = Path(folder) / config.output
            files = [str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()]
            logs = (output / "metrics.jsonl").read_text() if (output / "metrics.jsonl").exists() else ""
            return [ends, sorted(re.sub(r"\d{9,}.*", "", file) for file in files), re.findall(r'"step": (\d+)', logs)]

    def end(self, config: EngineConfig) -> list:
        model, calls = ByteModel(vocab_size=31, window=4, embedding_size=4, hidden_size=8), []
        console = Console(file=io.StringIO(), width=1000)

        def objective(model: nn.Module, batch: Batch) -> Totals:
            calls.append(1)
            totals = next_token_objective(model, batch)
            return totals._replace(loss_sum=totals.loss_sum * (self.at if len(calls) == 2 * SPIKE and torch.is_grad_enabled() else 1.0))

        torch.manual_seed(0)
        made = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=self.lr), config, objective=objective, console=console)
        try:
            made.fit(Loader(), held_out(), steps=self.steps)
        except CourseError as error:
            return [made.step, type(error).__name__]
        return [made.step, made.stopped, made.device.type, "marked" in console.file.getvalue()]


def run(*arguments: Any, **settings: Any) -> Callable[[EngineConfig], list]:
    return lambda config: Run(*arguments)(config, **settings)


def trackers_of(config: EngineConfig) -> list:
    """What each tracker is made with."""
    with patch.object(defaults, "known_peak", lambda device, dtype: None), patch.object(defaults, "make_tracker", lambda *a, **b: [a, b]):
        return [each for each in defaults.default_callbacks(config, torch.device("cpu")) if isinstance(each, list)]


def profiled(config: EngineConfig) -> list:
    with patch.object(defaults, "known_peak", lambda device, dtype: None):
        callbacks = defaults.default_callbacks(config, torch.device("cpu"))
    return [(each.first_step, each.last_step) for each in callbacks if type(each).__name__ == "Profile"]


def compiled(config: EngineConfig) -> list:
    found: list = []
    with patch.object(engine, "compile_model", lambda model, console: found.append(type(model).__name__)):
        return [run(2)(config), found]


def device_of(config: EngineConfig) -> list:
    asked: list = []

    def pick(name: str) -> torch.device:
        asked.append(name)
        return torch.device("cpu")

    with patch.object(engine, "pick_device", pick):
        RuntimeEngine(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), config, callbacks=[])
    return asked


QUIET = {"trackers": ["jsonl"], "log_every": 5, "evaluate_every": 0, "checkpoint": CheckpointConfig(every=0, asynchronous=False)}
STUCK = Run(lr=1e-30)

ENGINE = Effects(EngineConfig, observe=Run(), base=QUIET, rows={
    "output": Differs(Path("a"), Path("b")),
    "device": Differs("auto", "cpu", by=device_of),
    "compile": Differs(False, True, by=compiled),
    "log_every": Differs(5, 4),
    "evaluate_every": Differs(0, 3),
    "early_stopping": Differs(0, 2, by=STUCK, beside={"evaluate_every": 1}),
    "callbacks": Differs([], [Extension(f"{__file__}:Marked")]),
    "trackers": Differs(["jsonl"], []),
    "project": Differs("one", "other", by=trackers_of, beside={"trackers": ["wandb", "mlflow"]}),
    "wandb_mode": Differs("offline", "online", by=trackers_of, beside={"trackers": ["wandb"]}),
    "mlflow_uri": Differs(None, "sqlite:///x", by=trackers_of, beside={"trackers": ["mlflow"]}),
    "checkpoint": Differs(CheckpointConfig(every=0), CheckpointConfig(every=7)),
    "anomalies": Differs(AnomalyConfig(), AnomalyConfig(window=8), by=Run(at=1e3)),
    "dump": Differs(DumpConfig(), DumpConfig(every=5)),
    "profile": Differs(ProfileConfig(), ProfileConfig(first_step=2), by=profiled),
})  # fmt: skip


def within(name: str, observe: Callable[[EngineConfig], Any] = Run(), **more: Any) -> Callable[[Any], Any]:
    """Observe a section of the engine's configuration."""
    return lambda section: observe(EngineConfig(**QUIET | more | {name: section}))


def saved_by(config: EngineConfig) -> list[str]:
    """What this thread calls to save: another one writes, or it does."""
    return called_functions(lambda: run(2)(config), "shared.engine.checkpoint")


CHECKPOINT = Effects(CheckpointConfig, observe=within("checkpoint"), base={"every": 4, "asynchronous": False}, rows={
    "every": Differs(4, 7),
    "keep_last": Differs(2, 1),
    "keep_best": Differs(True, False, by=within("checkpoint", Run(lr=8.0), evaluate_every=4), beside={"keep_last": 1}),
    "asynchronous": Differs(False, True, by=within("checkpoint", saved_by)),
    "resume": Differs(True, False, by=within("checkpoint", run(6, fits=2))),
})  # fmt: skip

ANOMALIES = Effects(AnomalyConfig, observe=within("anomalies", Run(at=1e3)), base={"window": 8}, rows={
    "stop_on_nonfinite": Differs(True, False, by=within("anomalies", Run(at=math.inf))),
    "spike_deviations": Differs(12.0, 0.0),
    "window": Differs(8, 64),
})  # fmt: skip

DUMP = Effects(DumpConfig, observe=within("dump"), rows={
    "every": Differs(0, 5), "on_anomaly": Differs(True, False, by=within("dump", Run(at=math.inf))),
})  # fmt: skip

PROFILE = Effects(ProfileConfig, observe=within("profile", profiled), base={"first_step": 2}, rows={
    "first_step": Differs(2, 3), "steps": Differs(3, 4),
})  # fmt: skip

ALL = [ENGINE, CHECKPOINT, ANOMALIES, DUMP, PROFILE]
