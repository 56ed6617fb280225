"""Dropout on pipeline stages, in processes: each stage draws its own masks, a resumed run and a recomputed block the same again."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn
from trainer_runs import settings_file

from shared.parallel.config import parse_layout
from shared.parallel.processes.launch import run_processes
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import loaders
from shared.trainer.run import build
from shared.trainer.settings import parse_words

LAYERS, STEPS, MICROBATCHES = 4, 4, 2
MODEL = {"hidden_dropout": 0.5, "num_hidden_layers": LAYERS}
WAYS = {
    "plain": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "interleaved": {"pipeline_schedule": "interleaved", "pipeline_chunks": 2, "activation_checkpointing": "full"},
    "zero_bubble": {"pipeline_schedule": "zero_bubble"},
    "torch": {"backend": "torch"},
}


def fitted(world, file, output, **parallel):
    """The masks that this rank's dropout draws, in order, by layer; and its weights in the end."""
    config = parse_words(TrainerConfig, [str(file), f"engine.output={output}", f"steps={STEPS}"])
    run = build(replace(config, parallel=replace(parse_layout("pp2"), **parallel)), Console(quiet=True), world)
    drawn = []

    def keep(name):
        return lambda module, inputs, output: drawn.append((name, (output == 0).numpy().tobytes())) if module.training else None

    for name, module in run.strategy.module.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(keep(name))
    run.engine.fit(*loaders(run.config, run.text, run.strategy.mesh), steps=STEPS)
    return drawn, {name: weight.detach().clone() for name, weight in run.strategy.module.named_parameters()}


def everything(world, file, folder):
    """All that two ranks are asked for, in one world."""
    told = {way: fitted(world, file, folder / way, **settings) for way, settings in WAYS.items()}
    if world.rank == 0:
        shutil.rmtree(folder / "interleaved" / "checkpoints" / f"step-{STEPS:08}")
    world.gather_objects(None)
    return told | {"resumed": fitted(world, file, folder / "interleaved", **WAYS["interleaved"])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    file = settings_file(folder, folder / "prepared", model=MODEL, engine={"evaluate_every": 0}, report={"completions": 0})
    return run_processes(everything, 2, file, folder, timeout=300)


@pytest.mark.parametrize("way", WAYS)
def test_each_layer_of_each_stage_draws_masks_of_its_own(ranks, way):
    """Two ranks with one seed would draw the same masks in the same order."""
    drawn = [mask for rank in ranks for mask in set(rank[way][0])]
    assert len(drawn) == len({bits for _, bits in drawn}) == STEPS * MICROBATCHES * (2 * LAYERS + 1)  # of each block two; the embedding's
    assert len({name for name, _ in drawn}) == LAYERS + 1


@pytest.mark.parametrize("way", [way for way in WAYS if way != "interleaved"])
def test_schedules_draw_the_same_masks_and_recomputed_blocks_draw_theirs_again(ranks, way):
    again = {"recomputed": {2}, "selective": {1, 2}}.get(way, {1})  # PyTorch stops recomputing where nothing after it is needed
    for rank in ranks:
        (plain, weights), (drawn, own) = rank["plain"], rank[way]
        counts = Counter(drawn)
        assert counts.keys() == set(plain)
        assert {count for (name, _), count in counts.items() if "block" in name} == again
        for name, weight in weights.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_draws_the_masks_that_it_would_have_drawn(ranks):
    for rank in ranks:
        (drawn, weights), (again, own) = rank["interleaved"], rank["resumed"]
        assert again == drawn[len(drawn) // 2 :]
        assert all(torch.equal(own[name], weight) for name, weight in weights.items())
