"""Experts under tensor and sequence parallelism, cut along their inner width: one process's training, and what is summed just once."""

from dataclasses import replace

import pytest
import torch
from context_runs import batches
from mixture_runs import EXPERTS, MODEL, MixtureRun, alone, on_ranks, require_same

from shared.moe.layer import MixtureLayer, mixture_layers
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.health.replicas import ReplicasDiffer, require_equal

LAYOUTS = [
    ("tp2", "muon", "none"),
    ("tp4", "adamw", "selective"),
    ("tp2_sp", "muon", "full"),
    ("dp2_tp2_zero1", "muon", "none"),
    ("dp2_tp2_zero2_sp", "adamw", "selective"),
    ("fsdp2_tp2", "muon", "full"),
    ("fsdp2_tp2_sp", "adamw", "none"),
    ("pp2_tp2", "adamw", "none"),
    ("pp2_tp2_sp", "muon", "selective"),
    ("dp2_tp2_ep2", "muon", "full"),
    ("dp2_tp2_sp_ep2_zero1", "adamw", "none"),
    ("fsdp2_tp2_ep2", "muon", "none"),
    pytest.param("dp2_fsdp2_tp2_sp", "adamw", "full", marks=pytest.mark.slow),
    pytest.param("pp2_dp2_tp2_sp", "muon", "full", marks=pytest.mark.slow),
    pytest.param("pp2_dp2_tp2_sp_ep2", "muon", "selective", marks=pytest.mark.slow),
]


def layout_of(word: str, recompute: str = "none"):
    return replace(parse_layout(word), activation_checkpointing=recompute)


@pytest.mark.parametrize(("word", "optimizer", "recompute"), LAYOUTS)
def test_every_layout_trains_like_one_process(word, optimizer, recompute):
    require_same(on_ranks(layout_of(word, recompute), optimizer), alone(optimizer))


def test_each_rank_holds_a_slice_of_every_expert_and_the_same_router():
    def on_rank(world):
        run = MixtureRun(world, layout_of("tp2"), "muon").train(2)
        require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, world)
        layer = mixture_layers(run.plain)[0]
        return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}

    for shapes in run_threads(on_rank, 2):
        assert shapes["experts.up_proj.weight"] == shapes["experts.gate_proj.weight"] == (4, 8, 24)
        assert shapes["experts.down_proj.weight"] == (4, 24, 8) and shapes["shared_experts.down_proj.weight"] == (24, 8)
        assert shapes["router.weight"] == (4, 24)


@pytest.mark.parametrize("word", ["tp2", "tp2_sp"])
def test_experts_send_what_a_dense_layer_sends(word):
    """One all-reduce of the stream forward and one backward (with sequence parallelism their halves), and nothing else."""

    def on_rank(world, config):
        run = MixtureRun(world, layout_of(word), config=config)
        world.trace.clear()
        run.objective(run.parallel.model, batches(0, 0, config)).loss_sum.backward()
        return [(entry.operation, entry.bytes) for entry in world.trace.entries]

    for dense, mixed in zip(*(run_threads(on_rank, 2, config) for config in (replace(MODEL, experts=None), MODEL)), strict=True):
        assert dense == mixed


@pytest.mark.parametrize("planted", ["whole losses", "no sum for the router", "no f for the router"])
def test_the_comparison_notices(planted, monkeypatch):
    """One bug for each rule that the layer's docstring gives."""
    over_ranks = MixtureLayer.over_ranks

    def wrong(layer, group, leave):
        over_ranks(layer, group, leave)
        if planted == "whole losses":
            layer.copies = 1
        elif planted == "no sum for the router":
            del layer.router.weight.partial_over
        else:
            layer.router.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))

    monkeypatch.setattr(MixtureLayer, "over_ranks", wrong)
    with pytest.raises((AssertionError, ReplicasDiffer)):
        require_same(on_ranks(layout_of("tp2")), alone())


def test_a_loss_scale_reaches_the_routers():
    require_same(on_ranks(layout_of("tp2_sp"), scale=1024.0), alone())


def test_muon_takes_experts_that_are_cut_as_whole_matrices():
    """Cut along two different dimensions, each gathered before it is orthogonalised."""
    config = replace(MODEL, experts=replace(EXPERTS, n_group=2, topk_group=1, num_shared_experts=0, capacity_factor=None), gated=False)
    one = on_ranks(parse_layout("one"), "muon", config=config)[0]
    require_same(on_ranks(layout_of("tp2"), "muon", config=config), one)


@pytest.mark.parametrize("implementation", ["grouped", "batched", "loop"])
def test_in_16_bits_the_ranks_compute_the_gradients_of_one_process_up_to_rounding(implementation):
    experts = replace(EXPERTS, implementation=implementation, num_experts_per_tok=4, capacity_factor=None)
    config = replace(MODEL, initializer_range=0.02, experts=experts)

    def gradients(world, word):
        run = MixtureRun(world, layout_of(word), config=config, optimizer="adamw", computed_in=torch.bfloat16, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            run.train(1)
        return run.gradients()

    one = gradients(SingleRankCommunicator(), "one")
    for found in run_threads(lambda world: gradients(world, "tp2_sp"), 2):
        for name, value in found.items():
            assert value is None or (value - one[name]).norm() < 0.06 * one[name].norm(), name
