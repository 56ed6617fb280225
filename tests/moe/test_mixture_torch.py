"""Experts on PyTorch's engines: DistributedDataParallel, fully_shard and its pipeline train as one process does."""

from dataclasses import replace

import pytest
import torch
from mixture_runs import MODEL, MixtureRun, alone, observed, require_same

from shared.moe.layer import mixture_layers
from shared.parallel.config import parse_layout
from shared.parallel.processes.launch import run_processes

TWO = [
    ("dp2", "muon", {"activation_checkpointing": "full"}),
    ("dp2_zero1", "muon", {}),
    ("fsdp2", "muon", {"activation_checkpointing": "selective"}),
    ("pp2", "adamw", {}),
    ("dp2_ep2", "muon", {"activation_checkpointing": "selective"}),
    ("dp2_zero1_ep2", "adamw", {}),
]
FOUR = [
    ("dp2_fsdp2", "muon", {}),
    ("pp2_dp2", "adamw", {"activation_checkpointing": "full"}),
    ("pp2_fsdp2", "muon", {}),
    ("dp4_ep2", "muon", {}),
    ("dp4_zero1_ep2", "adamw", {"activation_checkpointing": "full"}),
    ("pp2_dp2_ep2", "muon", {}),
]


def trained(world, cases) -> list[dict]:
    """Several runs by the same processes, which take seconds to start."""
    found = []
    for word, optimizer, more in cases:
        run = MixtureRun(world, layout_of(word, more), optimizer)
        spread_out = mixture_layers(run.plain)[0].experts.forward.__self__
        assert bool(getattr(spread_out, "by_torch", None)) == ("ep" in word)
        found.append(observed(run))
    return found


def layout_of(word: str, more: dict):
    return replace(parse_layout(word), backend="torch", **more)


def gathered(world):
    """A router's and an expert's weights as a block in bfloat16 computes with them, and the bytes of all weights, counted and by name."""
    run = MixtureRun(world, layout_of("fsdp2", {}), config=MODEL, computed_in=torch.bfloat16, dtype=torch.float32)
    layer, seen = mixture_layers(run.plain)[0], {}
    whole = run.weights()[f"stack.blocks.{layer.layer}.feed_forward.router.weight"]
    layer.router.register_forward_pre_hook(lambda module, _: seen.update(router=module.weight.detach().clone()))
    layer.experts.up_proj.register_forward_pre_hook(lambda module, _: seen.update(experts=module.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        run.train(1)
    by_name = {name: 2 if name.startswith("stack.blocks.") and ".router." not in name else 4 for name in run.weights()}
    expected = sum(by_name[name] * weight.numel() for name, weight in run.weights().items())
    return torch.equal(seen["router"], whole), seen["experts"], run.parallel.whole_bytes - expected


def require_each(cases, found) -> None:
    for (_, optimizer, _), *of_ranks in zip(cases, *found, strict=True):
        require_same(of_ranks, alone(optimizer))


@pytest.fixture(scope="module")
def on_two():
    return run_processes(lambda world: (trained(world, TWO), gathered(world)), 2, timeout=600)


def test_two_ranks_train_like_one_process(on_two):
    require_each(TWO, [runs for runs, _ in on_two])


@pytest.mark.slow
def test_four_ranks_train_like_one_process():
    require_each(FOUR, run_processes(trained, 4, FOUR, timeout=600))


def test_fully_sharded_routers_are_gathered_in_their_own_precision(on_two):
    assert [weights for _, weights in on_two] == [(True, torch.bfloat16, 0)] * 2
