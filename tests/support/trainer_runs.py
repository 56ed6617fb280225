"""A tiny run of the trainer for its tests: its settings, and the trainer as its user starts it."""

import os
import subprocess
from pathlib import Path

import jinja2
import yaml
from scripts import run_script

from shared.course.paths import CHECKOUT
from shared.trainer.settings import merged

TRAIN = CHECKOUT / "chapters" / "12_grpo" / "train.py"
SOURCE = Path(jinja2.__file__).parent  # pinned, so the same files everywhere

TINY = {
    "steps": 6,
    "data": {
        "prepare": {"sources": [{"path": str(SOURCE), "suffixes": [".py"]}], "vocab_size": 512, "sentinels": 4, "held_out_share": 0.2},
        "seq": 96, "batch_size": 4, "micro_batch_size": 2, "held_out_rows": 8,
    },
    "model": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64,
        "max_position_embeddings": 96, "hidden_dropout": 0.1,
    },
    "optimizer": {"name": "muon", "lr": 0.02},
    "schedule": {"name": "wsd", "warmup_steps": 1, "decay_steps": 2},
    "precision": "float32",
    "engine": {"log_every": 2, "evaluate_every": 3, "device": "cpu", "checkpoint": {"every": 2}},
    "report": {"new_tokens": 8, "completions": 2, "prompts": ["def "]},
}  # fmt: skip


def settings_file(folder: Path, prepared: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    path, written = folder / "tiny.yaml", folder / f"tiny.yaml.{os.getpid()}"
    written.write_text(
        yaml.safe_dump(merged(merged(TINY, {"data": {"prepared": str(prepared)}, "engine": {"output": str(folder / "run")}}), changes))
    )
    os.replace(written, path)  # ranks may each write it, and read it while another does
    return path


def train(*words, **how) -> subprocess.CompletedProcess:
    return run_script(TRAIN, *words, cwd=Path.cwd(), **how)
