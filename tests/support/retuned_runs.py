"""Tiny runs that are extended, retuned and continued elsewhere: a short one, its copies, and what of their folders tests compare."""

import json
import shutil
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file

from shared.engine.checkpoint.folder import Checkpoints
from shared.trainer.config import TrainerConfig
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

QUIET = Console(quiet=True)
PLAIN = {"schedule": {"name": "constant", "warmup_steps": 0}, "report": {"export": False, "completions": 0, "prompts": []}}


def short_run(folder: Path, prepared: Path) -> Path:
    """A run of four steps in `folder`/run."""
    path = settings_file(folder, prepared, **PLAIN | {"steps": 4})
    train_model(parse_words(TrainerConfig, [str(path)]), QUIET)
    return folder


def copied(short: Path, folder: Path, prepared: Path, *words: str) -> TrainerConfig:
    """The settings of the short run, copied into another folder, with other words."""
    shutil.copytree(short / "run", folder / "run")
    return parse_words(TrainerConfig, [str(settings_file(folder, prepared, **PLAIN | {"steps": 4})), *words])


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """And the optimizer's state."""
    folder = Checkpoints(folder / "checkpoints").path(step)
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rates_of(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: next(value for name, value in row.items() if name.startswith("learning_rate")) for row in rows}
