"""Noisy top-k and expert choice against brute force, and what expert choice costs: it looks ahead."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from brute_force import CONFIG
from test_mixture_layer import context, make, numbers

from shared.course.errors import SettingError
from shared.moe.config import MixtureConfig

routers = import_module("chapters.09_mixture_of_experts.routers")


def noisy(experts: MixtureConfig):
    layer = make(experts)
    routers.use_noisy_routers(layer, layer_config(experts))
    torch.nn.init.normal_(layer.router.noise_weight, generator=torch.Generator().manual_seed(3))
    return layer


def layer_config(experts: MixtureConfig):
    return replace(CONFIG, experts=experts).resolved()


def test_noisy_top_k_is_the_papers_formula_token_by_token():
    layer, x = noisy(MixtureConfig(5, 16, num_experts_per_tok=2)), numbers(2, 7, 24)
    torch.manual_seed(11)
    routing = layer.router(x)
    torch.manual_seed(11)
    noise = torch.randn(2, 7, 5, dtype=torch.float64)
    for row in range(2):
        for place in range(7):
            clean, spread = (x[row, place] @ weight.T for weight in (layer.router.weight, layer.router.noise_weight))
            columns = zip(clean.tolist(), noise[row, place].tolist(), spread.tolist(), strict=True)
            h = [c + n * math.log1p(math.exp(s)) for c, n, s in columns]
            best = sorted(range(5), key=lambda e: -h[e])[:2]
            total = sum(math.exp(h[e]) for e in best)
            assert routing.experts[row, place].tolist() == best
            assert routing.weights[row, place].tolist() == pytest.approx([math.exp(h[e]) / total for e in best], rel=1e-12)


def test_noise_is_for_training_alone_and_its_weight_has_a_gradient():
    layer, x = noisy(MixtureConfig(5, 16, num_experts_per_tok=2)), numbers(2, 7, 24)
    layer(x, context()).square().sum().backward()
    assert layer.router.noise_weight.grad.abs().sum() > 0 and layer.router.weight.grad.abs().sum() > 0
    assert not torch.equal(layer.router(x).logits, layer.router(x).logits)
    torch.testing.assert_close(layer.eval().router(x).logits, x @ layer.router.weight.T)


def test_noise_lets_an_expert_be_chosen_that_never_would_be():
    layer, x = make(MixtureConfig(4, 16, num_experts_per_tok=1)), numbers(8, 16, 24)
    with torch.no_grad():
        layer.router.weight.mul_(1e-3)
        layer.router.weight[0] = 0.05 * x.flatten(0, 1).mean(dim=0).sign()  # a little better than the others for some tokens
    torch.manual_seed(0)
    plain = layer.router(x).experts.flatten().bincount(minlength=4)
    routers.use_noisy_routers(layer, layer_config(layer.config))
    with_noise = layer.router(x).experts.flatten().bincount(minlength=4)
    assert with_noise.max() < plain.max() and with_noise.min() > 16, (plain, with_noise)


@pytest.mark.parametrize("factor", [None, 1.5])
def test_expert_choice_is_that_of_a_loop_over_experts(factor):
    layer, x, upstream = make(MixtureConfig(4, 16, capacity_factor=factor)), numbers(3, 10, 24), numbers(3, 10, 24, seed=1)
    routers.use_expert_choice(layer)
    x.requires_grad_()
    wanted = torch.zeros(3, 10, 24, dtype=torch.float64)
    probabilities = (x @ layer.router.weight.T).softmax(dim=-1)
    takes = math.ceil((factor or 1) * 2 * 10 / 4)
    taken = 0
    for row in range(3):
        for expert in range(4):
            order = sorted(range(10), key=lambda place: -probabilities[row, place, expert].item())
            for place in order[:takes]:
                own = layer.experts
                gate, up, down = (linear.weight[expert] for linear in (own.gate_proj, own.up_proj, own.down_proj))
                inner = torch.nn.functional.silu(gate @ x[row, place]) * (up @ x[row, place])
                one = torch.zeros_like(wanted)
                one[row, place] = 1
                wanted = wanted + one * probabilities[row, place, expert] * (down @ inner)
                taken += 1
    out = layer(x, context())
    assert taken == 3 * 4 * takes
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    parameters = [x, *layer.parameters()]
    found, expected = (torch.autograd.grad((y * upstream).sum(), parameters) for y in (out, wanted))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_expert_choice_looks_at_later_tokens_and_top_k_does_not():
    for chooses, causal in ((lambda layer: None, True), (routers.use_expert_choice, False)):
        layer, x = make(MixtureConfig(4, 16)), numbers(1, 16, 24)
        chooses(layer)
        later = x.clone()
        later[:, 8:] = numbers(1, 8, 24, seed=7) * 3
        difference = (layer(later, context())[:, :8] - layer(x, context())[:, :8]).abs().max()
        assert (difference < 1e-12) == causal, difference


def test_expert_choice_is_refused_where_later_tokens_must_not_count():
    layer = make(MixtureConfig(4, 16))
    routers.use_expert_choice(layer)
    with pytest.raises(SettingError, match="look at later tokens"):
        layer.eval()(numbers(1, 4, 24), context())
