"""The shipped configurations with experts: one that two cards of 24 GB can hold, and one for a laptop, which trains."""

import json
from dataclasses import replace

import pytest
import yaml
from memory_table import ADAMW
from trainer_runs import TINY, TRAIN, train

from shared.engine.metrics.flops import model_flops_per_token
from shared.model.counting import active_feed_forward_size, parameter_counts
from shared.parallel.config import parse_layout
from shared.parallel.planning.memory import StepSizes, estimate_memory
from shared.parallel.planning.pipeline_costs import estimate_ranks
from shared.trainer.config import TrainerConfig
from shared.trainer.planner import memory as planned_memory
from shared.trainer.planner.memory import memory_needed, step_sizes
from shared.trainer.settings import merged, parse_text, read_settings

GIB = 2**30


def configuration(name: str) -> TrainerConfig:
    """With the vocabulary that its text gets."""
    config = parse_text(TrainerConfig, yaml.safe_dump(read_settings(TRAIN.parent / name)))
    return replace(config, model=replace(config.model, vocab_size=config.data.prepare.vocab_size))


def test_two_cards_of_24_gigabytes_hold_the_mixture_and_neither_holds_it_alone():
    """CUDA and its libraries take 1 GB. An uneven load, 1.5 times the mean on one card, still fits."""
    config = configuration("two_3090s_ep2.yaml")
    model, layout, step = config.model, config.parallel, step_sizes(config)
    counts = parameter_counts(model)
    active = sum(counts.values()) - counts["expert"] + 2 * counts["expert"] // 8
    assert 1.4e9 < sum(counts.values()) < 1.6e9 and 4.2e8 < active < 4.7e8
    assert layout.ranks == 2 and step.microbatches == 32
    for imbalance, most in ((1.0, 18e9), (1.5, 20e9)):
        (needs,) = estimate_ranks(model, layout, config.optimizer, replace(step, imbalance=imbalance), packed=True)
        assert 15e9 < needs.total < most, f"{needs.total / 1e9:.1f} GB"
    assert 15e9 < memory_needed(config) < 18e9
    alone = estimate_memory(model, parse_layout("one"), config.optimizer, step, packed=True)
    replicas = estimate_memory(model, parse_layout("dp2_zero1"), config.optimizer, step, packed=True)
    assert min(alone.total, replicas.total) > 24e9


def test_a_mixture_that_cannot_fit_is_refused_with_what_it_needs(monkeypatch):
    config = configuration("two_3090s_ep2.yaml")
    monkeypatch.setattr(planned_memory, "memory_of", lambda device: 12 * GIB)
    with pytest.raises(planned_memory.SettingError, match=r"a rank needs about 17 GiB and cuda has 12"):
        planned_memory.require_memory(config, "cuda")


def test_a_laptops_mixture_takes_the_arithmetic_of_the_dense_model():
    dense, sparse = configuration("laptop.yaml"), configuration("laptop_moe.yaml")
    router = 8 * sparse.model.hidden_size
    assert active_feed_forward_size(sparse.model.resolved(), 0) == active_feed_forward_size(dense.model.resolved(), 0) + router
    assert model_flops_per_token(sparse.model, 256) < 1.01 * model_flops_per_token(dense.model, 256)
    assert sum(parameter_counts(sparse.model).values()) > 2.5 * sum(parameter_counts(dense.model).values())
    assert memory_needed(sparse) < 1.5 * GIB
    (estimate,) = estimate_ranks(sparse.model, sparse.parallel, ADAMW, StepSizes(8, 256), packed=True)
    assert estimate.weights == 4 * sum(parameter_counts(sparse.model).values())


def test_the_laptops_mixture_trains(tmp_path):
    """Three steps of two of its layers, on a few small files; experts and optimizer are as they are shipped."""
    settings = merged(read_settings(TRAIN.parent / "laptop_moe.yaml"), {
        "steps": 3, "precision": "float32", "schedule": {"warmup_steps": 1, "decay_steps": 1},
        "report": {"completions": 0, "new_tokens": 4}, "model": {"num_hidden_layers": 2},
        "data": TINY["data"] | {"prepared": str(tmp_path / "prepared"), "seq": 48, "batch_size": 4, "held_out_rows": 4},
        "engine": {"output": str(tmp_path / "run"), "log_every": 1, "evaluate_every": 3, "device": "cpu", "checkpoint": {"every": 3}},
    })  # fmt: skip
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(settings))
    done = train(tmp_path / "few.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0] and {f"experts/load/{block}.{expert}" for block in range(2) for expert in range(8)} <= rows[-1].keys()
