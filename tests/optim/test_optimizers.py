"""Floor 5: what is asked of an optimizer takes effect or is refused, its state is saved and loaded, and it steps as it says."""

import copy
import json

import pytest
import torch
from optim_models import (
    CONFIGS,
    NAMES,
    batches,
    by_config,
    model_of,
    same,
    trained,
)
from torch import nn

from shared.engine.checkpoint.optimizer_state import load_optimizer_state, name_optimizer_state
from shared.loss import next_token_objective
from shared.optim import muon
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.optimizer import GroupedOptimizer
from shared.optim.routing import route
from shared.optim.updater import Update

# What goes where.


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_one_group_and_only_matrices_and_embeddings_decay(name):
    model = model_of()
    optimizer = build_optimizer(model, OptimizerConfig(name, lr=0.01, weight_decay=0.1))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    names = {parameter: called for called, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            vector = "norm" in names[parameter] or names[parameter].endswith("bias")
            assert group["weight_decay"] == (0.0 if vector else 0.1), names[parameter]
            table = names[parameter].startswith(("embedding", "head"))
            assert group["rule"] == ("adamw" if name == "muon" and (vector or table) else name), names[parameter]


def test_experts_are_a_batch_of_matrices_and_other_shapes_are_not():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(3, 5, 7)), "alone": nn.Parameter(torch.randn(5, 7))})
            self.gate, self.scale = nn.Linear(4, 2, bias=False), nn.Parameter(torch.ones(4))
            self.filters = nn.Parameter(torch.ones(2, 3, 4, 4))

    rules = {name: part.rule for part in route(Odd(), "muon", no_decay=[], to_adamw=[]) for name in part.names}
    assert rules == {"experts.up": "muon", "experts.alone": "muon", "gate.weight": "muon", "scale": "adamw", "filters": "adamw"}
    model = Odd()
    optimizer = GroupedOptimizer([{"params": [model.experts["up"]], "rule": "muon", "lr": 1.0, "weight_decay": 0.0, "momentum": 0.9,
                                   "nesterov": True, "scaling": "original", "steps": 5, "dtype": "float64"}])  # fmt: skip
    before, gradient = model.experts["up"].detach().clone(), torch.randn(3, 5, 7)
    model.experts["up"].grad = gradient.clone()
    optimizer.step()
    alone = [nn.Parameter(matrix.clone()) for matrix in before]
    other = GroupedOptimizer([{**optimizer.param_groups[0], "params": alone}])
    for parameter, part in zip(alone, gradient, strict=True):
        parameter.grad = part.clone()
    other.step()
    assert torch.allclose(torch.stack([parameter.detach() for parameter in alone]), model.experts["up"], atol=1e-6)


def test_patterns_take_effect_or_are_refused():
    model = model_of()
    settings = {"no_decay": ["*.q_proj.weight"], "to_adamw": ["*.o_proj.weight", "*.down_proj.weight"]}
    parts = {name: part for part in route(model, "muon", **settings) for name in part.names}
    assert not parts["stack.blocks.0.attention.q_proj.weight"].decays and parts["stack.blocks.0.attention.k_proj.weight"].decays
    rules = {name.split(".")[-2]: part.rule for name, part in parts.items() if "blocks.1.attention." in name and "bias" not in name}
    assert rules == {"q_proj": "muon", "k_proj": "muon", "v_proj": "muon", "o_proj": "adamw"}
    for option in ("no_decay", "to_adamw"):
        with pytest.raises(ValueError, match=rf"{option}: no trainable parameter has a name like 'blocks\.\*'. Names look like 'embedding"):
            build_optimizer(model, OptimizerConfig("muon", **{option: ["blocks.*"]}))
    with pytest.raises(ValueError, match="not one parameter is a matrix.* and others: optimizer.to_adamw takes them out"):
        build_optimizer(model, OptimizerConfig("muon", to_adamw=["*"]))
    model.requires_grad_(False).head.requires_grad_(True)
    with pytest.raises(ValueError, match="Trained are head.linear.weight: embeddings, the head, .* are for AdamW. Give optimizer.name"):
        build_optimizer(model, OptimizerConfig("muon"))


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused():
    model = model_of()
    model.embedding.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig("muon"))
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {parameter for parameter in model.parameters() if parameter.requires_grad}
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "lion", "fused": True}, "lion does not use it: it is for adamw and muon"),
        ({"name": "adamw", "to_adamw": ["*"]}, "adamw does not use it"),
        ({"name": "sgd", "betas": (0.9, 0.9)}, "sgd does not use it"),
        ({"lr": 0.0}, "lr is 0.0: give a number above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0: give at least 0"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"name": "muon", "scaling": "original"}, "give adamw_lr"),
        ({"name": "muon", "newton_schulz_steps": 0}, "at least 1"),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**settings)


def test_a_group_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="the rule 'adam': choose adamw, lion, muon, sgd"):
        GroupedOptimizer([{"params": [nn.Parameter(torch.ones(1))], "rule": "adam", "lr": 1.0}])


# Steps.


@by_config
def test_each_optimizer_trains(config):
    losses = trained(model := model_of(), build_optimizer(model, config), 60, updater=Update(max_norm=1.0))
    assert losses[0] > 3.2 and sum(losses[-5:]) / 5 < losses[0] / 2


@by_config
def test_a_parameter_without_a_gradient_is_left_alone(config):
    model = model_of()
    optimizer = build_optimizer(model, config)
    kept = copy.deepcopy(model)
    moved = model.stack.blocks["0"].attention.q_proj.weight
    moved.grad = torch.randn(moved.shape)
    optimizer.step()
    changed = [name for (name, a), b in zip(model.named_parameters(), kept.parameters(), strict=True) if not torch.equal(a, b)]
    assert changed == ["stack.blocks.0.attention.q_proj.weight"] and list(optimizer.state) == [moved]


def test_matrices_that_are_orthogonalised_together_step_as_they_would_alone(monkeypatch):
    together, alone = model_of(), model_of()
    trained(together, build_optimizer(together, CONFIGS["muon"]), 3)
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 1)
    assert all(len(batch) == 1 for batch in muon.bucket_by_shape([with_gradient(p) for p in model_of().parameters()]))
    trained(alone, build_optimizer(alone, CONFIGS["muon"]), 3)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(together.parameters(), alone.parameters(), strict=True))


def with_gradient(parameter):
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def test_batches_are_of_one_kind_and_bounded(monkeypatch):
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 100)
    parameters = [with_gradient(nn.Parameter(torch.ones(*shape))) for shape in [(5, 7)] * 5 + [(7, 5)] * 2 + [(20, 20)] * 2]
    found = sorted([tuple(p.shape) for p in batch] for batch in muon.bucket_by_shape(parameters))
    assert found == [[(5, 7)], [(5, 7)] * 2, [(5, 7)] * 2, [(7, 5)] * 2, [(20, 20)], [(20, 20)]]


def test_a_closure_is_called_with_gradients_on():
    model = model_of()
    optimizer = build_optimizer(model, CONFIGS["adamw"])
    [batch] = next(batches())

    def closure():
        loss = next_token_objective(model, batch).loss_sum
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0 and len(optimizer.state) == len(list(model.parameters()))


# State.


@by_config
@pytest.mark.parametrize("how", ["torch's state_dict", "by parameter names"])
def test_resuming_from_the_optimizer_state_equals_an_uninterrupted_run(config, how):
    whole, first = model_of(), model_of()
    trained(whole, build_optimizer(whole, config), 6)
    optimizer, source = build_optimizer(first, config), batches()
    trained(first, optimizer, 3, source)
    second = copy.deepcopy(first)
    resumed = build_optimizer(second, config)
    if how == "torch's state_dict":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        state = name_optimizer_state(first, optimizer)
        state.groups = json.loads(json.dumps(state.groups))  # as a checkpoint keeps them
        load_optimizer_state(second, resumed, state)
    trained(second, resumed, 3, source)
    assert same(second, whole)
    assert not same(first, whole)


@by_config
def test_the_state_is_tensors_and_plain_settings(config):
    model = model_of()
    trained(model, optimizer := build_optimizer(model, config), 1)
    state = optimizer.state_dict()
    assert all(isinstance(value, torch.Tensor) for held in state["state"].values() for value in held.values())
    json.dumps(state["param_groups"])
