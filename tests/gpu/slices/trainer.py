"""The trainer from a YAML file to its report on this device, with a profile, TensorBoard, a checkpoint and an export.

The text is generated here, so that nothing is downloaded and no package but the core's is read.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from gpu_machine import Machine
from gpu_rows import Row
from rich.console import Console

from shared.trainer.config import TrainerConfig
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as chapters/12_grpo/train.py sets it


def run(machine: Machine, small: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = settings(folder, machine, small)
        config = parse_words(TrainerConfig, [str(words)])
        losses = trained(config, folder)
        about = {"first loss": losses[0], "last loss": losses[-1], "steps": config.steps}
        yield Row("trains to its report", about, losses[-1] < losses[0] and (folder / "run" / "report.html").is_file())
        yield Row("exports the model", {}, (folder / "run" / "model" / "model.safetensors").is_file())
        yield from traces(machine, folder / "run")
        again = trained(config, folder)
        yield Row("the same command again finds its checkpoint, and trains no step", {}, again == losses)


def settings(folder: Path, machine: Machine, small: bool) -> Path:
    """A YAML file of a few seconds. Where TensorBoard is installed, it is written to."""
    text = "".join(f"def f{i % 97}(x):\n    return x * {i % 89} + {i % 83}  # line {i}\n\n" for i in range(1500 if small else 40000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    size, steps = (32, 6) if small else (256, 60)
    chosen = {
        "steps": steps,
        "data": {
            "prepare": {"sources": [{"path": str(folder / "text.txt")}], "vocab_size": 400, "held_out_share": 0.1},
            "prepared": str(folder / "prepared"), "seq": 64, "batch_size": 4 if small else 32, "micro_batch_size": 2 if small else 16,
            "held_out_rows": 4, "fim": {"rate": 0.5},
        },
        "model": {
            "hidden_size": size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 3 * size,
            "max_position_embeddings": 64, "tie_word_embeddings": True,
        },
        "optimizer": {"name": "muon", "lr": 0.003}, "schedule": {"name": "cosine", "warmup_steps": 1},
        "engine": {
            "output": str(folder / "run"), "device": machine.device.type, "log_every": 2, "evaluate_every": 3,
            "checkpoint": {"every": 4}, "profile": {"first_step": 3, "steps": 2},
            "trackers": ["jsonl"] + ["tensorboard"] * bool(importlib.util.find_spec("tensorboard")),
        },
        "report": {"prompts": ["def "], "completions": 1, "new_tokens": 8},
    }  # fmt: skip
    path = folder / "gpu.yaml"
    path.write_text(yaml.safe_dump(chosen), encoding="utf-8")
    return path


def trained(config: TrainerConfig, folder: Path) -> list[float]:
    """The losses that the run's log holds."""
    train_model(config, Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def traces(machine: Machine, run: Path) -> Iterator[Row]:
    """The profiler's trace names the GPU's kernels, and TensorBoard's file is there."""
    trace = json.loads(next((run / "profile").glob("*.json")).read_text(encoding="utf-8"))
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    yield Row("the profile holds kernels", {"kinds of events": len(kinds)}, not machine.is_gpu or "kernel" in kinds)
    if importlib.util.find_spec("tensorboard"):
        yield Row("TensorBoard's file is written", {}, any(run.rglob("events.out.tfevents*")))
