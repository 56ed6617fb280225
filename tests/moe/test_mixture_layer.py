"""The mixture-of-experts layer against brute force in float64: outputs, every gradient, losses, dropping, empty experts, precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from brute_force import CONFIG, dense_gates, drop, losses, mix
from test_expert_exchange import Operations
from torch import Tensor, nn

from shared.model.context import AttentionContext
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.moe.dispatch import combine, expert_capacity
from shared.moe.experts import PRODUCTS, grouped_product, loop_product
from shared.moe.layer import MixtureLayer
from shared.moe.router import top_k_routing

KINDS = {
    "Mixtral": MixtureConfig(5, 16),
    "Switch, one expert": MixtureConfig(5, 16, num_experts_per_tok=1, norm_topk_prob=False),
    "OLMoE": MixtureConfig(5, 16, num_experts_per_tok=3, norm_topk_prob=False),
    "all experts": MixtureConfig(3, 16, num_experts_per_tok=3),
    "DeepSeek-V3": MixtureConfig(
        8, 16, num_experts_per_tok=3, scoring="sigmoid", routed_scaling_factor=2.5, n_group=4, topk_group=2, num_shared_experts=2,
        bias_update_rate=0.001,
    ),
    "softmax with a bias": MixtureConfig(5, 16, bias_update_rate=0.001),
    "capacity": MixtureConfig(5, 16, capacity_factor=0.7),
    "no capacity to speak of": MixtureConfig(5, 16, num_experts_per_tok=1, capacity_factor=0.01),
}  # fmt: skip
by_kind = pytest.mark.parametrize("experts", KINDS.values(), ids=KINDS)
LOSSES = {"balance_coefficient": 0.3, "z_coefficient": 0.1}


def make(experts: MixtureConfig, **changes) -> MixtureLayer:
    layer = MixtureLayer(replace(CONFIG, experts=experts, **changes).resolved(), MIXTURE, 1).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(valid: Tensor | None = None, loss_scale: float = 1.0) -> AttentionContext:
    return AttentionContext({}, valid=valid, loss_scale=loss_scale)


VALID = torch.tensor([[False] * 4 + [True] * 7, [True] * 11, [False] * 11])


def gradients(layer: nn.Module, x: Tensor, total: Tensor) -> dict[str, Tensor]:
    named = {"x": x} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


@by_kind
@pytest.mark.parametrize("implementation", PRODUCTS)
def test_outputs_and_every_gradient_are_those_of_brute_force(experts, implementation):
    layer, x, upstream = make(replace(experts, implementation=implementation, **LOSSES)), numbers(3, 11, 24), numbers(3, 11, 24, seed=1)
    x.requires_grad_()
    out = layer(x, context(VALID))
    found = gradients(layer, x, (out * upstream).sum())
    logits, scores, gates = dense_gates(layer, x)
    kept = gates
    if experts.capacity_factor:
        order = layer.router(x).experts
        kept = drop(gates, order, -int(-experts.capacity_factor * 11 * experts.num_experts_per_tok // experts.num_experts))
        assert (kept != gates).any(), "something is dropped"
    expected = mix(layer, x, kept)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    wanted = gradients(layer, x, (expected * upstream).sum() + losses(layer, logits, scores, gates, VALID))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11, msg=f"{name}: {(found[name] - gradient).abs().max()}")


def test_experts_without_a_gate_are_plain_feed_forward_layers():
    layer, x = make(KINDS["Mixtral"], gated=False, hidden_act="gelu"), numbers(2, 7, 24)
    torch.testing.assert_close(layer(x, context()), mix(layer, x, dense_gates(layer, x)[2]), rtol=1e-12, atol=1e-12)


def test_a_gate_has_the_models_activation():
    layer, x = make(replace(KINDS["Mixtral"], num_experts_per_tok=1), hidden_act="gelu"), numbers(2, 7, 24)
    experts, expected = layer.experts, []
    for token, chosen in zip(x.flatten(0, 1), layer.router(x).experts.flatten(), strict=True):
        gate, up, down = (linear.weight[chosen] for linear in (experts.gate_proj, experts.up_proj, experts.down_proj))
        expected.append(down @ (F.gelu(gate @ token) * (up @ token)))
    torch.testing.assert_close(layer(x, context()), torch.stack(expected).view_as(x), rtol=1e-12, atol=1e-12)


def test_capacity_is_a_limit_of_training_alone():
    layer, x = make(KINDS["capacity"]), numbers(2, 11, 24)
    full = mix(layer, x, dense_gates(layer, x)[2])
    assert (layer(x, context()) - full).abs().max() > 1e-3
    torch.testing.assert_close(layer.eval()(x, context()), full, rtol=1e-12, atol=1e-12)


def test_what_is_dropped_depends_on_earlier_tokens_of_its_own_row_alone():
    layer, x = make(KINDS["capacity"]), numbers(2, 11, 24)
    out, changed = layer(x, context()), x.clone()
    changed[1], changed[0, 8:] = changed[1] + 1, 0.3
    again = layer(changed, context())
    torch.testing.assert_close(again[0, :8], out[0, :8], rtol=1e-13, atol=1e-13)


def test_grouped_products_run_and_every_row_belongs_to_an_expert(monkeypatch):
    """`grouped_mm` leaves rows past the last offset as the memory was, in its result and in its gradient."""
    seen = []
    original = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: (seen.append((len(a), int(offs[-1]))), original(a, b, offs=offs))[1])
    layer, x = make(KINDS["capacity"]).float(), numbers(2, 11, 24).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, context())
    out.square().sum().backward()
    assert seen and all(length == last for length, last in seen)
    assert x.grad.isfinite().all()
    rows, weight = numbers(6, 6).bfloat16(), numbers(2, 5, 6).bfloat16()
    torch.testing.assert_close(grouped_product(rows, weight, torch.tensor([2, 4])), loop_product(rows, weight, torch.tensor([2, 4])))
    assert len(seen) == 3, "rows that are no multiple of 16 bytes go through the loop"


def test_no_loop_runs_over_tokens():
    """Ten times the tokens, as many operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls = getattr(self, "calls", 0) + 1
            return function(*args, **kwargs or {})

    layer, calls = make(KINDS["capacity"]), []
    for seq in (30, 300):
        with Count() as count:
            layer(numbers(2, seq, 24), context(torch.ones(2, seq, dtype=torch.bool)))
        calls.append(count.calls)
    assert calls[0] == calls[1]


def test_counting_the_load_neither_sorts_nor_waits_for_the_device():
    layer, x = make(replace(KINDS["Mixtral"], balance_coefficient=0.0)), numbers(3, 11, 24)
    routing = layer.router(x)
    with Operations() as operations:
        y = layer.with_losses(x.requires_grad_() * 1, routing, context(VALID))
    assert not {"sort", "argsort", "nonzero", "index", "_local_scalar_dense"} & set(operations.names), operations.names
    y.sum().backward()
    assert layer.load.tolist() == routing.experts[VALID].flatten().bincount(minlength=5).tolist()


def test_where_nothing_is_said_of_padding_every_token_counts():
    layer, x, found = make(replace(KINDS["capacity"], **LOSSES)), numbers(2, 11, 24), []
    for valid in (None, torch.ones(2, 11, dtype=torch.bool)):
        layer.load = None
        layer(x, context(valid)).sum().backward()
        assert layer.load.sum() == 2 * 2 * 11, "also the choices that were dropped"
        found.append(layer.router.weight.grad.clone())
        layer.router.weight.grad = None
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_scores_that_are_all_zero_have_weights_without_nan():
    scores = torch.zeros(3, 6, requires_grad=True)
    weights, _ = top_k_routing(scores, 2, normalize=True)
    weights.sum().backward()
    assert not weights.any() and scores.grad.isfinite().all()


def test_a_closed_group_stays_closed_where_biased_scores_are_negative():
    scores, routings = numbers(9, 8).sigmoid(), []
    for bias in (0.0, -2.0):
        bias = torch.full((8,), bias, dtype=torch.float64)
        routings.append(top_k_routing(scores, 2, normalize=True, bias=bias, groups=4, best_groups=1))
    torch.testing.assert_close(*routings, rtol=0, atol=0)
    assert torch.equal(*(routings[0][1] // 2).T), "both are of the only open group"


def test_sums_over_the_experts_are_taken_in_the_wider_dtype():
    rows, weights = numbers(8, 5).bfloat16(), numbers(4, 2, seed=1).float().softmax(dim=-1)
    expected = (rows.double().unflatten(0, (4, 2)) * weights.double().unsqueeze(-1)).sum(dim=1)
    assert torch.equal(combine(rows, torch.arange(8), weights), expected.bfloat16())


def test_the_bias_steers_the_choice_and_never_the_weights():
    scores = numbers(9, 6).sigmoid().requires_grad_()
    bias = torch.zeros(6, dtype=torch.float64)
    bias[4] = 10.0
    weights, experts = top_k_routing(scores, 2, normalize=False, bias=bias)
    assert (experts[:, 0] == 4).all()
    torch.testing.assert_close(weights, scores.gather(1, experts), rtol=0, atol=0)
    layer = make(KINDS["softmax with a bias"])
    layer.router.bias.requires_grad_()
    out = layer(numbers(2, 5, 24), context())
    assert torch.autograd.grad(out.sum(), layer.router.bias, allow_unused=True) == (None,)


def test_the_router_computes_in_float32_under_autocast():
    layer, x = make(KINDS["Mixtral"]).float(), numbers(2, 11, 24).float()
    plain = layer.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, out = layer.router(x), layer(x, context())
    assert out.dtype == torch.bfloat16 and all(torch.equal(a, b) for a, b in zip(plain, narrow, strict=True))
    rounded = (x.bfloat16() @ layer.router.weight.bfloat16().T).float()
    assert (rounded - plain.logits).abs().max() > 1e-3, "in bfloat16 the logits would be others"
    torch.testing.assert_close(out.float(), layer(x, context()), rtol=0.05, atol=0.05)


def test_padding_takes_no_part_in_losses_and_load():
    layer, x = make(replace(KINDS["Mixtral"], **LOSSES)), numbers(3, 11, 24)
    found = []
    for shift in (0.0, 1.0):
        changed = torch.where(VALID.unsqueeze(-1), x, x + shift).requires_grad_()
        layer.load = None
        (layer(changed, context(VALID)) * 0).sum().backward()
        assert layer.load.sum() == 2 * VALID.sum()
        found.append((layer.router.weight.grad.clone(), layer.load))
        layer.router.weight.grad = None
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 5, "n_group": 4, "topk_group": 2}, "4 to choose from"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "groups of 2 or more"),
        ({"n_group": 0}, "n_group is 0"),
        ({"topk_group": 2}, "topk_group"),
        ({"topk_group": 0}, "topk_group is 0"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"first_k_dense": -1}, "first_k_dense"),
        ({"z_coefficient": -1.0}, "z_coefficient"),
        ({"balance_coefficient": -1.0}, "balance_coefficient"),
        ({"bias_update_rate": -1.0}, "bias_update_rate"),
        ({"z_coefficient": float("nan")}, "z_coefficient is nan"),
        ({"balance_coefficient": float("inf")}, "balance_coefficient is inf"),
        ({"bias_update_rate": float("nan")}, "bias_update_rate is nan"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"implementation": "groupd"}, "Did you mean 'grouped'"),
    ],
)
def test_a_wrong_setting_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        replace(MixtureConfig(8, 16), **changes)


def test_a_model_that_has_no_place_for_experts_is_refused():
    with pytest.raises(ValueError, match="mlp_bias"):
        replace(CONFIG, experts=MixtureConfig(8, 16), mlp_bias=True)


CAPACITIES = [(1.1, 100, 1, 10, 11), (1.1, 100, 4, 4, 110), (1.1, 50, 2, 10, 11), (1.25, 8, 2, 8, 3), (1, 7, 2, 4, 4)]


@pytest.mark.parametrize("factor, seq, k, experts, capacity", CAPACITIES)
def test_a_capacity_is_the_written_decimal_times_the_equal_share_rounded_up(factor, seq, k, experts, capacity):
    """In floating point 1.1 * 100 is more than 110."""
    assert expert_capacity(factor, seq, k, experts) == capacity
