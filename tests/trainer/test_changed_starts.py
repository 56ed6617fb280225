"""A run whose start_from is removed or replaced while it reads it: one sentence, or the run as it would have been."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from preferring_runs import preferring_config
from rich.console import Console
from safetensors.torch import load_file, save_file
from tuned_runs import tuned_config

from shared.course.errors import CourseError
from shared.trainer import run
from shared.trainer.run import train_model

SHORT = ("steps=1", "schedule.warmup_steps=0", "schedule.decay_steps=0", "adapter.rank=2")
SHORT += ("instructions.examples=60", "instructions.tasks=2")
WEIGHTS = "model.safetensors"


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    """As another run of the same settings does: by a rename, with tensors of the same names and shapes."""
    save_file({name: 2 * tensor for name, tensor in load_file(folder / WEIGHTS).items()}, folder / "new", {"format": "pt"})
    (folder / "new").replace(folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "moment", "says"),
    [
        (remove, "resolved", "is gone, which this run starts from: put it back"),
        (remove, "parallel_model", "start_from: .* has no config.json"),
        (replace, "parallel_model", "has changed since this run began to read it: put back what was there"),
        (remove, "evaluate_and_report", "is gone, which this run starts from: put it back"),
        (replace, "evaluate_and_report", "has changed since this run began to read it: put back what was there"),
        (remove, "build_optimizer", "start does not exist"),  # before a reference reads it once more
        (replace, "build_optimizer", "has changed since this run began to read it: put back what was there"),
    ],
)
def test_a_start_that_changes_is_a_sentence_and_the_run_ends_once_it_is_back(tmp_path, base, change, moment, says):
    start, inner = tmp_path / "start", getattr(run, moment)
    shutil.copytree(base / "model", start)
    if moment == "build_optimizer":
        config = preferring_config(tmp_path, base, "dpo", f"start_from={start}", *SHORT[:3])
    else:
        config = tuned_config(tmp_path, base, f"start_from={start}", *SHORT)

    def changed(*given):
        change(start)
        return inner(*given)

    with patch.object(run, moment, changed), pytest.raises(CourseError, match=says):
        train_model(config, Console(quiet=True))
    assert not (config.engine.output / "results.json").exists()
    if moment != "evaluate_and_report":
        assert not [*config.engine.output.glob("checkpoints/step-*")], "it trained first"
    if moment == "evaluate_and_report":
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(base / "model", start)
        train_model(config, Console(quiet=True))
        assert (config.engine.output / "results.json").exists() and (config.engine.output / "model" / WEIGHTS).exists()
