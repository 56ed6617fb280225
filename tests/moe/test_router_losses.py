"""The balance loss and the z-loss against transformers' functions, each in its own convention; what balance and collapse cost."""

from dataclasses import fields, replace

import pytest
import torch
from brute_force import CONFIG
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.switch_transformers.modeling_switch_transformers import load_balancing_loss_func as switch_loss
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from shared.model.config import ModelConfig
from shared.moe.config import MixtureConfig
from shared.moe.losses import balance_loss, balance_scale, z_loss
from shared.moe.router import top_k_routing

E = 7
LOGITS = torch.randn(4, 13, E, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ALL = torch.ones(4, 13, dtype=torch.bool)


def scale(convention: str, k: int, layers: int = 1) -> float:
    experts = MixtureConfig(E, 16, num_experts_per_tok=k, balance_convention=convention)
    return balance_scale(replace(CONFIG, num_hidden_layers=layers), experts)


def chosen(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = logits.softmax(dim=-1)
    return probabilities, top_k_routing(probabilities, k, normalize=True)[1]


def test_switchs_loss_is_the_mean_over_tokens_of_the_rows_losses():
    """transformers' function for Switch takes its statistics row by row, as ours does."""
    logits = LOGITS.clone().requires_grad_()
    probabilities, experts = chosen(logits, 1)
    ours = scale("switch", 1) * balance_loss(probabilities, experts, ALL) / ALL.sum()
    theirs = switch_loss(probabilities, experts)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)  # theirs counts in float32
    of_ours, of_theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_mixtrals_loss_is_that_of_one_layer_and_one_row(k):
    logits, mask = LOGITS[:1].clone().requires_grad_(), ALL[:1].clone()
    mask[:, 9:] = False
    ours = scale("transformers", k) * balance_loss(*chosen(logits, k), mask) / mask.sum()
    theirs = mixtral_loss((logits.flatten(0, 1),), E, k, mask.long()).double()  # counted and added up in float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    of_ours, of_theirs = (torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs))
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-5, atol=1e-7)


def test_pooled_layers_let_opposite_imbalances_cancel():
    """transformers pools the tokens of all layers before the product; summed by layer, as here, a collapse in each layer shows."""
    first, last = torch.full((1, 13, E), -9.0), torch.full((1, 13, E), -9.0)
    first[..., 0], last[..., 1] = 9.0, 9.0
    ours = sum(scale("transformers", 1, layers=2) * balance_loss(*chosen(each, 1), ALL[:1]) / 13 for each in (first, last))
    pooled = mixtral_loss((first.flatten(0, 1), last.flatten(0, 1)), E, 1)
    torch.testing.assert_close(ours, torch.tensor(float(E)), rtol=1e-4, atol=0)
    torch.testing.assert_close(pooled, torch.tensor(E / 2), rtol=1e-4, atol=0)


def test_the_z_loss_is_that_of_transformers():
    logits = LOGITS.clone().requires_grad_()
    ours, theirs = z_loss(logits, ALL) / ALL.sum(), router_z_loss_func(logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("convention", "balanced"), [("megatron", 1.0), ("switch", 2.0), ("transformers", 2.0 / 3)])
def test_a_balanced_layer_costs_what_its_convention_says_and_a_collapsed_one_more(convention, balanced):
    """k is 2, and there are 3 layers, whose losses are added up: transformers' convention makes 2 of the three."""
    even = torch.stack([torch.arange(14) % E, (torch.arange(14) + 1) % E], dim=-1).unsqueeze(0)
    valid = torch.ones(1, 14, dtype=torch.bool)
    flat = torch.full((1, 14, E), 1 / E)
    layer = scale(convention, 2, layers=3) * balance_loss(flat, even, valid) / 14
    torch.testing.assert_close(layer, torch.tensor(balanced))
    collapsed = torch.nn.functional.one_hot(torch.zeros(1, 14, dtype=torch.int64), E).float()
    worst = scale(convention, 2, layers=3) * balance_loss(collapsed, torch.zeros_like(even) + torch.tensor([0, 1]), valid) / 14
    torch.testing.assert_close(worst / layer, torch.tensor(E / 2))


def test_a_mean_over_the_layers_counts_those_that_have_experts():
    config, experts = replace(CONFIG, num_hidden_layers=5), MixtureConfig(E, 16, first_k_dense=2, balance_convention="transformers")
    assert balance_scale(config, experts) == E / 3


def test_a_row_without_valid_tokens_adds_nothing():
    none = torch.zeros(4, 13, dtype=torch.bool)
    for loss in (balance_loss(*chosen(LOGITS, 2), none), z_loss(LOGITS * torch.nan, none)):
        assert loss == 0


def test_experts_leave_a_dense_models_settings_alone():
    plain = ModelConfig(**{entry.name: getattr(CONFIG, entry.name) for entry in fields(ModelConfig)})
    assert replace(CONFIG, experts=None) == replace(CONFIG) and CONFIG.differences(plain) == {}
