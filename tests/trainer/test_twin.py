"""Scaled-down twins of every configuration in chapters/12_grpo: what decides which code runs is kept, and the twin trains."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from workspace import COMMAND

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.engine.trackers.jsonl import read_damaged
from shared.model.families import preset
from shared.moe.config import MixtureModelConfig
from shared.parallel.config import parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.launch.twin import make_twin, small_model
from shared.trainer.settings import parse_words
from shared.trainer.planner.opening import start_shape

FOLDER = CHECKOUT / "chapters" / "12_grpo"
FILES = sorted([*FOLDER.glob("laptop*.yaml"), *FOLDER.glob("two_3090s*.yaml")])
KEPT = ("mode", "seed", "optimizer", "precision", "max_grad_norm", "impl", "reward", "dpo")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_twin_keeps_what_decides_which_code_runs(file, tmp_path):
    full, twin = make_twin(file, {}, tmp_path / "twin", 2)
    for name in KEPT:
        assert getattr(twin, name) == getattr(full, name), name
    assert replace(twin.parallel, collective_timeout=full.parallel.collective_timeout) == full.parallel
    assert (twin.adapter and replace(twin.adapter, rank=1, alpha=1.0)) == (full.adapter and replace(full.adapter, rank=1, alpha=1.0))
    assert twin.schedule.name == full.schedule.name and twin.schedule.warmup_steps == min(1, full.schedule.warmup_steps)
    assert (microbatches(twin) > 1) == (microbatches(full) > 1), "accumulation is another code path"
    assert (twin.model.experts is None) == (full.model.experts is None) and twin.model.gated == full.model.gated
    assert parse_words(TrainerConfig, [str(tmp_path / "twin" / "twin.yaml")]).steps == 2


def microbatches(config: TrainerConfig) -> int:
    share = config.data.batch_size // config.parallel.data_ranks
    return share // min(config.data.micro_batch_size, share)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2", "fsdp2_tp2", "dp2_ep2"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "qwen2-7b", "mistral-7b", "gpt2", "t5-small", "t5-v1.1-base", "bloom-560m"])
def test_a_small_model_is_of_the_same_architecture(name, layout):
    full = preset(name).resolved()
    small = small_model(MixtureModelConfig(**vars(full)), parse_layout(layout))
    for field in ("architecture", "position", "norm", "norm_position", "qk_norm", "hidden_act", "gated", "attention_bias", "mlp_bias",
                  "tie_word_embeddings", "rope_scaling", "hidden_dropout"):  # fmt: skip
        assert getattr(small, field) == getattr(full, field), field
    assert (small.num_key_value_heads < small.num_attention_heads) == (full.num_key_value_heads < full.num_attention_heads)
    assert small.hidden_size <= 128 and small.num_hidden_layers <= 4
    assert (small.attention_scale == small.head_dim**-0.5) == (full.attention_scale == full.head_dim**-0.5)


def test_the_shape_of_a_model_that_is_not_there():
    shape = start_shape({"start_from": "models/llama-3.1-8b-instruct"}, FOLDER / "two_3090s_dpo.yaml")
    assert (shape.hidden_size, shape.num_key_value_heads) == (4096, 8)
    shape = start_shape({"start_from": "runs/two_3090s"}, FOLDER / "two_3090s_sft.yaml")
    assert (shape.hidden_size, shape.num_hidden_layers, shape.vocab_size) == (768, 12, 50304)
    with pytest.raises(CourseError, match="models/nobody, which is not there.*begins with none of gpt2"):
        start_shape({"start_from": "models/nobody"}, FOLDER / "two_3090s_dpo.yaml")


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(CourseError, match="holds no twin: give another --output"):
        make_twin(FILES[0], {}, tmp_path, 2)
    assert (tmp_path / "precious").read_text() == "mine"


def trained(file: Path, folder: Path, *more: str) -> list[float]:
    """The losses of a twin, trained as its user trains it."""
    words = ["twin", file, *more, "--steps", "2", "--output", folder / "twin"]
    done = subprocess.run([*COMMAND, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The twin of {file} ran: 2 steps" in done.stdout
    metrics, damage = read_damaged(folder / "twin" / "run" / "metrics.jsonl")
    assert not damage
    return [entry["train/loss"] for entry in metrics.values() if "train/loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_twin_trains(file, tmp_path):
    losses = trained(file, tmp_path)
    assert len(losses) == 2 and all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_the_twin_of_every_stage_of_the_pipeline_on_two_cards_trains(number, tmp_path):
    """With the words that the pipeline gives to a stage; where it starts from is random weights here."""
    stage = yaml.safe_load((FOLDER / "pipelines" / "two_3090s.yaml").read_text())["stages"][number]
    words = [f"{name}={value}" for name, value in stage.get("words", {}).items()]
    losses = trained(FOLDER / "pipelines" / stage["config"], tmp_path, *words, "--layout", stage["layout"])
    assert len(losses) == 2 and all(map(math.isfinite, losses))
