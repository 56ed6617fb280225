"""A tiny training pipeline of four stages, as its user starts it."""

import sys
from pathlib import Path

import yaml
from preferring_runs import preferring_file
from trainer_runs import settings_file
from tuned_runs import tuned_file

LENGTHS = {"steps": 3, "schedule": {"decay_steps": 0}}


def pipeline_file(folder: Path, **changes) -> Path:
    """pretrain, sft, dpo and grpo, each of a few steps, into `folder`/all. changes: of the file's keys."""
    files = {
        "pretrain": settings_file(folder / "a", folder / "prepared", model={"max_position_embeddings": 128}, **LENGTHS),
        "sft": tuned_file(folder / "b", folder / "a" / "run", **LENGTHS),
        "dpo": preferring_file(folder / "c", folder / "b" / "run", "dpo", **LENGTHS),
        "grpo": preferring_file(folder / "d", folder / "c" / "run", "grpo", **LENGTHS),
    }
    words = {"data.prepared": str(folder / "prepared"), "engine.checkpoint.every": 1}
    stages = [{"name": name, "config": str(file), "words": words} for name, file in files.items()]
    path = folder / "tiny_pipeline.yaml"
    path.write_text(yaml.safe_dump({"output": str(folder / "all"), "stages": stages} | changes))
    return path


def command(path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "shared.trainer.pipeline.chain", str(path), *words]
