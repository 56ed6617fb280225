"""Tiny fine-tuning runs: a base model that was trained for a few steps, and the settings of a run that starts from it."""

from pathlib import Path

import yaml
from trainer_runs import TINY, settings_file, train

from shared.trainer.config import TrainerConfig
from shared.trainer.settings import merged, parse_words

SIZES = {"max_position_embeddings": 128, "hidden_size": 64, "intermediate_size": 128}  # NF4 takes blocks of 64 inputs
KEPT = ("steps", "optimizer", "schedule", "precision", "engine", "report")
TUNED = {
    "mode": "sft",
    "data": {"seq": 128, "batch_size": 4, "micro_batch_size": 2, "held_out_rows": 8},
    "model": {"max_position_embeddings": 128, "hidden_dropout": 0.1},
    "instructions": {"examples": 300, "tasks": 12},
    "report": {"new_tokens": 12},
}


def base_run(folder: Path) -> Path:
    """A pretrained model: the folder of its run."""
    done = train(settings_file(folder, folder / "prepared", model=SIZES))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def tuned_file(folder: Path, base: Path, **changes) -> Path:
    """The settings of a run from `base`, in `folder`/run."""
    folder.mkdir(exist_ok=True, parents=True)
    settings = merged({name: TINY[name] for name in KEPT}, TUNED)
    where = {"start_from": str(base), "data": {"prepared": str(base.parent / "chats")}, "engine": {"output": str(folder / "run")}}
    path = folder / "tuned.yaml"
    path.write_text(yaml.safe_dump(merged(merged(settings, where), changes)))
    return path


def tuned_config(folder: Path, base: Path, *words: str, **changes) -> TrainerConfig:
    return parse_words(TrainerConfig, [str(tuned_file(folder, base, **changes)), *words])
