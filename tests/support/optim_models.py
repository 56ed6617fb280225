"""Small models, data and configurations for the tests of floor 5."""


import pytest
import torch

from shared.loop import train
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig

SMALL = ModelConfig(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.1, attention_bias=True)
NAMES = ("adamw", "lion", "muon", "sgd")
CONFIGS = {
    "adamw": OptimizerConfig("adamw", lr=0.01),
    "adamw, fused": OptimizerConfig("adamw", lr=0.01, fused=True),
    "lion": OptimizerConfig("lion", lr=0.002),
    "muon": OptimizerConfig("muon", lr=0.02, newton_schulz_dtype="float32"),
    "muon, original": OptimizerConfig("muon", lr=0.05, scaling="original", adamw_lr=0.01, newton_schulz_dtype="float32"),
    "sgd": OptimizerConfig("sgd", lr=0.3, momentum=0.9),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def model_of(seed: int = 0) -> TransformerModel:
    return TransformerModel(SMALL, seed=seed)


def batches(seed: int = 0):
    """Sentences in which each word is the last one plus 7."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = (torch.randint(31, (8, 1), generator=generator) + 7 * torch.arange(13)) % 31
        yield [{"input_ids": ids[:, :-1], "targets": ids[:, 1:]}]


def trained(model, optimizer, steps: int, source=None, **parts) -> list[float]:
    return [totals.mean_loss for _, totals in train(model, optimizer, source or batches(), next_token_objective, steps=steps, **parts)]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))
