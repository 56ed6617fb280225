"""Weights, active weights, FLOPs, initial values and Muon of a mixture, each beside a count or an optimizer that knows nothing of ours."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers
from brute_force import CONFIG
from test_mixture_formats import THEIRS
from torch.utils.flop_counter import FlopCounterMode

from shared.engine.metrics.flops import model_flops_per_token
from shared.model.counting import active_feed_forward_size, parameter_counts
from shared.model.hf.registry import read_config
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig

EXPERTS = MixtureConfig(6, 16, num_experts_per_tok=2, num_shared_experts=1, first_k_dense=1, bias_update_rate=0.01)
MODEL = replace(CONFIG, experts=EXPERTS)


@pytest.mark.parametrize("config", THEIRS.values(), ids=THEIRS)
def test_the_number_of_weights_is_transformers(config):
    """Their model is built without memory. The bias of the choice is no parameter of theirs."""
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    biases = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
    theirs.config.architectures = [type(theirs).__name__]
    _, ours = read_config(json.loads(theirs.config.to_json_string(use_diff=False)))
    assert sum(parameter_counts(ours).values()) == sum(p.numel() for p in theirs.parameters()) + biases


def test_active_weights_are_those_that_one_token_gives_a_gradient():
    model = TransformerModel(MODEL, MIXTURE, seed=1).double()
    model(torch.tensor([[7]])).square().sum().backward()
    for layer, block in enumerate(model.stack.blocks.values()):
        active = 0
        for parameter in block.feed_forward.parameters():
            if parameter.dim() == 3:  # a stack: a matrix for each expert
                active += sum(matrix.numel() for matrix in parameter.grad if matrix.any())
            elif parameter.grad is not None:
                active += parameter.numel()
        assert active == active_feed_forward_size(MODEL.resolved(), layer)


def test_flops_are_those_of_the_products_that_run():
    """FlopCounterMode sees a product for each expert, the router's, and both of attention's, forward and backward."""
    config = replace(MODEL, attention="eager", experts=replace(EXPERTS, implementation="loop", balance_coefficient=0.0))
    model, ids = TransformerModel(config, MIXTURE).double(), torch.arange(24).view(2, 12)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == 24 * model_flops_per_token(config, 12)


def test_muon_steps_a_stack_as_torch_steps_each_of_its_matrices():
    model = TransformerModel(replace(MODEL, num_hidden_layers=2), MIXTURE, seed=2)
    weight = model.stack.blocks["1"].feed_forward.experts.down_proj.weight
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in weight]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
    oracle = torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    ours = build_optimizer(model, OptimizerConfig("muon", lr=0.02, weight_decay=0.1, newton_schulz_dtype="bfloat16"))
    begun = weight.detach().clone()
    for step in range(3):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)) * torch.logspace(-3, 3, 6).view(-1, 1, 1)
        weight.grad = gradient
        for matrix, own in zip(theirs, gradient, strict=True):
            matrix.grad = own.clone()
        ours.step(), oracle.step()
    moved, expected = weight.detach() - begun, torch.stack([matrix.detach() for matrix in theirs]) - begun
    for mine, other in zip(moved, expected, strict=True):
        assert (mine - other).norm() < 0.02 * other.norm(), "bfloat16"


def test_every_matrix_of_a_mixture_begins_with_its_own_spread():
    """Normal with initializer_range, divided by the root of the number of additions where it writes into the residual stream; biases 0."""
    config = replace(MODEL, hidden_size=96, experts=replace(EXPERTS, moe_intermediate_size=64), initializer_range=0.05)
    layer = TransformerModel(config, MIXTURE, seed=4).stack.blocks["2"].feed_forward
    written = 0.05 / math.sqrt(2 * 3)
    expected = {
        "router.weight": 0.05, "experts.gate_proj.weight": 0.05, "experts.up_proj.weight": 0.05, "experts.down_proj.weight": written,
        "shared_experts.gate_proj.weight": 0.05, "shared_experts.up_proj.weight": 0.05, "shared_experts.down_proj.weight": written,
    }  # fmt: skip
    found = dict(layer.named_parameters())
    assert found.keys() == {*expected, "router.bias"} and not found["router.bias"].any()
    for name, spread in expected.items():
        for matrix in found[name] if found[name].dim() == 3 else [found[name]]:
            assert matrix.std().item() == pytest.approx(spread, rel=0.1), name
            assert abs(matrix.mean().item()) < 5 * spread / math.sqrt(matrix.numel()), name
    experts = found["experts.up_proj.weight"].flatten(1)
    assert torch.corrcoef(experts).fill_diagonal_(0).abs().max() < 0.1, "no two experts begin alike"
