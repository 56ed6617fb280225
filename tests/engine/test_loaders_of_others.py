"""Loaders that were not written for the engine: `DataLoader`'s pairs (x, y), single batches, and what is refused in a sentence."""

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared.course.errors import CourseError
from shared.engine.config import EngineConfig
from shared.engine.engine import RuntimeEngine

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def fitted(folder, loader, model=None, held_out=None, steps=4):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    config = EngineConfig(output=folder, device="cpu", log_every=1, trackers=["jsonl"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RuntimeEngine(model, optimizer, config, console=Console(quiet=True)).fit(loader, held_out, steps=steps)


def test_a_plain_module_and_a_data_loader_train_as_a_loop_of_pytorchs_does(tmp_path):
    data = DataLoader(TensorDataset(X, Y), 6)
    engine = fitted(tmp_path, data, held_out=data)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert engine.validation.mean_loss == pytest.approx(nn.functional.cross_entropy(plain(X), Y).item(), rel=1e-5)


def test_a_batch_alone_a_pair_and_a_list_of_micro_batches_are_the_same_step(tmp_path):
    named, pairs = {"input_ids": X, "targets": Y}, [(X[:12], Y[:12]), (X[12:], Y[12:])]
    steps = [named], [(X, Y)], [[named]], [pairs]
    engines = [fitted(tmp_path / str(number), step, steps=1) for number, step in enumerate(steps)]
    for engine in engines[1:]:
        for ours, theirs in zip(engine.model.parameters(), engines[0].model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("loader", "model", "said"),
    [
        ([X], None, "The loader yielded Tensor as a batch: yield a dictionary of tensors, a pair"),
        (["text"], None, "The loader yielded str as a batch"),
        ([(X, Y.float())], None, "The targets are torch.float32, and next-token prediction needs classes"),
        ([{"x": X, "y": Y}], None, "The batch holds x, y, and next-token prediction needs input_ids and targets"),
        ([(X[None], Y[None])], nn.LSTM(4, 3), "The model returned tuple, and next-token prediction needs logits"),
    ],
)
def test_what_is_neither_is_refused_in_a_sentence(tmp_path, loader, model, said):
    with pytest.raises(CourseError, match=said):
        fitted(tmp_path, loader, model)
