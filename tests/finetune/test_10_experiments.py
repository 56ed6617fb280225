"""The experiment of chapter 10 as a reader starts it, made so small that it shows nothing but that it runs, and what it counts."""

import json
from importlib import import_module

import pytest
import torch

from shared.data.tokenizer import TextTokenizer

experiments = import_module("chapters.10_finetuning.experiments")
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
TEXT = "def area(width, height):\n    return width * height  # {name: 'x'} 0123456789\n" * 20


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(experiments, "MODEL", experiments.MODEL | SMALL)
    tokenizer = TextTokenizer.train([TEXT], 300, sentinels=0)
    monkeypatch.setattr(experiments, "tokenizer_of", lambda vocab_size: tokenizer)
    monkeypatch.setattr(experiments, "base_stream", lambda vocab_size: torch.tensor(tokenizer.encode(TEXT * 9)))
    experiments.base_weights.cache_clear()
    yield
    experiments.base_weights.cache_clear()


def test_every_way_of_fine_tuning_continues_the_same_base(small, tmp_path, capsys):
    sizes = {"base_steps": 2, "steps": 2, "seq": 144, "batch_size": 2, "vocab_size": 300, "conversations": 30, "tasks": 2}
    config = experiments.AdapterExperimentConfig(seeds=1, **sizes, output=tmp_path)
    experiments.run(config)
    found = {entry["variant"]: entry["figures"] for entry in json.loads((tmp_path / "adapters.json").read_text())}
    assert found.keys() == experiments.VARIANTS.keys() and all(0 < figures[experiments.LOSS] < 20 for figures in found.values())
    trained = {name: figures[experiments.TRAINED] for name, figures in found.items()}
    assert trained["prompt, 16"] == 16 * 64 and trained["prefix, 16"] == 16 * 2 * 32
    assert trained["LoRA, rank 4"] == 4 * trained["LoRA, rank 1"] < trained["DoRA, rank 4"] < trained["full"]
    held = {name: figures[experiments.HELD] for name, figures in found.items()}
    assert held["QLoRA, rank 16"] < held["LoRA, rank 16"] < held["full"]
    assert all(figures[experiments.COMPUTED] > 0 for figures in found.values())
    assert "Lowest" in capsys.readouterr().out
    for plot in ("adapters.png", "adapters_right.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
