"""Tiny runs of the trainer's modes on preferences: their settings, and a run that is stopped after a step and resumed."""

import shutil
from pathlib import Path

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import TINY
from tuned_runs import KEPT

from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.run import build, train_model
from shared.trainer.settings import merged, parse_words

OF_MODES = {
    "data": {"seq": 128, "batch_size": 4, "micro_batch_size": 2, "held_out_rows": 8},
    "model": {"max_position_embeddings": 128, "hidden_dropout": 0.1},
    "preferences": {"made": {"pairs": 120, "prompts": 6}},
    "report": {"new_tokens": 12},
    "steps": 6,
    "engine": {"log_every": 1, "checkpoint": {"every": 2, "keep_last": 9}},
}
ROLLING = {
    "ppo": {"reward": "gold", "prompts": 8, "new_tokens": 6, "passes": 2, "minibatches": 2},
    "grpo": {
        "prompts": 4, "answers": 2, "new_tokens": 6, "passes": 2, "minibatches": 2, "held_out_answers": 4,
        "tasks": {"made": {"kinds": ["sum"], "digits": 1, "training": 40}, "held_out": 5},
        "rewards": [{"name": "task"}, {"name": "format", "pattern": "(?s).*[aeiou].*", "weight": 0.5}],
    },
}  # fmt: skip
STILL = (
    "model.hidden_dropout=0.0", "optimizer.name=sgd", "optimizer.lr=0.2", "schedule.warmup_steps=0", "schedule.decay_steps=0", "steps=3",
)  # fmt: skip


def preferring_file(folder: Path, base: Path, mode: str, **changes) -> Path:
    """The settings of a run of this mode from `base`, in `folder`/run."""
    folder.mkdir(exist_ok=True, parents=True)
    settings = merged({name: TINY[name] for name in KEPT}, OF_MODES | {"mode": mode} | ({mode: ROLLING[mode]} if mode in ROLLING else {}))
    if mode == "grpo":
        del settings["preferences"]
    if mode in ROLLING:  # they refuse what only a held-out loss needs
        settings = settings | {"data": {name: value for name, value in settings["data"].items() if name != "held_out_rows"}}
        settings["engine"] = settings["engine"] | {"evaluate_every": 0}
    where = {"start_from": str(base), "data": {"prepared": str(base.parent / "pairs")}, "engine": {"output": str(folder / "run")}}
    path = folder / "preferring.yaml"
    path.write_text(yaml.safe_dump(merged(merged(settings, where), changes)))
    return path


def preferring_config(folder: Path, base: Path, mode: str, *words: str, **changes) -> TrainerConfig:
    return parse_words(TrainerConfig, [str(preferring_file(folder, base, mode, **changes)), *words])


def went_on(config: TrainerConfig, after: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The last checkpoint of a finished run, and that of the same run as if it had been killed after a step."""
    folder = config.engine.output / "checkpoints"
    whole = last_weights(folder)
    for path in folder.iterdir():
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)
    train_model(config, Console(quiet=True))
    return whole, last_weights(folder)


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    last = max(folder.iterdir())
    return {f"{path.name}/{name}": tensor for path in sorted(last.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def trained(folder: Path, base: Path, mode: str, layout: str, *words: str) -> dict[str, torch.Tensor]:
    """The weights after a few steps without dropout, in a layout; "" for one process."""
    asked = vars(parse_layout(layout)) if layout else {}
    degrees = [f"parallel.{name}={value}" for name, value in asked.items() if value != getattr(ParallelConfig(), name)]
    config = preferring_config(folder / (layout or "alone"), base, mode, *STILL, *degrees, *words)

    def work(world):
        run = build(config, Console(quiet=True), world)
        run.engine.fit(*run.mode.loaders(run.config, run.strategy), steps=config.steps)
        return run.strategy.full_weights()

    return run_threads(work, config.parallel.ranks)[0]
