"""Property tests of chapter 02's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import importlib
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SOLUTION = importlib.import_module("solutions.02_transformer")
FEW = settings(max_examples=60)
SEED, SMALL, FEW_HEADS = st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3)
HALF = st.sampled_from([torch.bfloat16, torch.float16])
DTYPE = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(seed: int, batch: int, shared: int, group: int, queries: int, keys: int, size: int, dtype=torch.float64):
    """Queries [batch, shared * group, queries, size], and keys and values [batch, shared, keys, size]."""
    shapes = (batch, shared * group, queries, size), (batch, shared, keys, size), (batch, shared, keys, size)
    return [drawn(seed + number, *shape, dtype=dtype) for number, shape in enumerate(shapes)]


@FEW
@given(SEED, SMALL, FEW_HEADS, FEW_HEADS, SMALL, SMALL, SMALL)
def test_attention_is_the_mean_of_the_values_that_its_equation_weighs(seed, batch, shared, group, queries, keys, size):
    q, k, v = heads(seed, batch, shared, group, queries, keys, size)
    may_look = drawn(seed + 3, batch, 1, queries, keys) > 0
    bias = drawn(seed + 4, batch, shared * group, queries, keys)
    before = [each.clone() for each in (q, k, v)]
    found = SOLUTION.grouped_query_attention(q, k, v, may_look, bias, 0.7)
    assert all(torch.equal(old, new) for old, new in zip(before, (q, k, v)))
    for b, h, i in [(0, 0, 0), (batch - 1, shared * group - 1, queries - 1)]:
        seen, g = [j for j in range(keys) if may_look[b, 0, i, j]], h // group
        scores = [math.exp(0.7 * float(q[b, h, i] @ k[b, g, j]) + float(bias[b, h, i, j])) for j in seen]
        mean = sum((score / sum(scores) * v[b, g, j] for score, j in zip(scores, seen)), torch.zeros(size, dtype=torch.float64))
        assert torch.allclose(found[b, h, i], mean, rtol=1e-9, atol=1e-12)


@FEW
@given(SEED, SMALL, FEW_HEADS, SMALL, SMALL, DTYPE)
def test_attention_has_the_values_dtype_zeros_where_nothing_is_seen_and_hides_no_other_nan(seed, batch, group, queries, keys, dtype):
    q, k, v = heads(seed, batch, 2, group, queries, keys, 4, dtype)
    may_look = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    may_look[0, :, 0] = False
    q.requires_grad_()
    found = SOLUTION.grouped_query_attention(q, k, v, may_look)
    found.sum().backward()
    assert found.dtype == dtype and found.shape == (batch, 2 * group, queries, 4)
    assert not found[0, :, 0].any() and not q.grad[0, :, 0].any() and found.isfinite().all() and q.grad.isfinite().all()
    broken = q.detach().clone()
    broken[-1, 0, -1, 0] = torch.nan
    lost = SOLUTION.grouped_query_attention(broken, k, v).isnan().any(dim=-1)
    assert lost.sum() == 1 and lost[-1, 0, -1]


@FEW
@given(SEED, SMALL, SMALL, HALF, st.integers(-200, 200))
def test_a_number_added_to_every_score_changes_nothing_in_half_precision_either(seed, queries, keys, dtype, number):
    q, k, v = heads(seed, 1, 1, 2, queries, keys, 4, dtype)
    bias = torch.full((1, 1, 1, keys), float(number)).to(dtype)
    plain = SOLUTION.grouped_query_attention(q, k, v).double()
    assert torch.allclose(SOLUTION.grouped_query_attention(q, k, v, bias=bias).double(), plain, rtol=2e-2, atol=2e-2)


@FEW
@given(SEED, SMALL, FEW_HEADS, SMALL, SMALL, DTYPE, st.booleans())
def test_rope_turns_each_pair_by_its_own_angle(seed, batch, count, length, half, dtype, rows):
    x = drawn(seed, batch, count, length, 2 * half, dtype=dtype)
    angles = drawn(seed + 1, *((batch, 1) if rows else ()), length, half, dtype=torch.float32)
    before = x.clone()
    found = SOLUTION.apply_rope(x, angles.cos(), angles.sin())
    assert torch.equal(x, before) and found.dtype == dtype and found.shape == x.shape
    points, turned = (torch.complex(*each.double().chunk(2, dim=-1)) for each in (x, found))
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-6)  # one rounding; the tables are float32
    assert torch.allclose(turned, points * torch.exp(1j * angles.double()), rtol=tolerance, atol=4 * tolerance)


@FEW
@given(SEED, SMALL, st.integers(1, 40), DTYPE, st.floats(1e-2, 1e3), st.sampled_from([1e-6, 1e-3, 0.5]))
def test_rms_norm_divides_by_the_root_of_the_mean_square(seed, rows, size, dtype, scale, eps):
    x, weight = drawn(seed, rows, size).mul(scale).to(dtype), drawn(seed + 1, size, dtype=dtype)
    before = x.clone()
    found = SOLUTION.rms_norm(x, weight, eps)
    wide = x.double()
    wanted = wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()
    tolerance = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}.get(dtype, 1e-12)  # half precision rounds twice
    assert torch.equal(x, before) and found.dtype == dtype
    assert torch.allclose(found.double(), wanted, rtol=tolerance, atol=1e-7 if dtype == torch.float16 else 1e-12)


@FEW
@given(SEED, HALF, st.integers(1, 9))
def test_rms_norm_keeps_a_float32_weight_and_shows_nan(seed, dtype, size):
    x, weight = drawn(seed, 3, size, dtype=dtype), drawn(seed + 1, size, dtype=torch.float32)
    found = SOLUTION.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.float32
    assert torch.equal(found, SOLUTION.rms_norm(x, torch.ones(size, dtype=dtype), 1e-5).float() * weight)
    x[1, 0] = torch.nan
    assert SOLUTION.rms_norm(x, weight, 1e-5).isnan().all(dim=-1).tolist() == [False, True, False]


@FEW
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=6), st.integers(-3, 3), st.integers(-3, 3), st.integers(-3, 3))
def test_swiglu_multiplies_the_opened_gate_with_up_and_calls_each_once(numbers, by_gate, to_up, by_down):
    x, calls = torch.tensor(numbers, dtype=torch.float64), []

    def noting(name, function):
        return lambda x: calls.append(name) or function(x)

    layers = [noting("gate", lambda x: by_gate * x), noting("up", lambda x: x + to_up), noting("down", lambda x: by_down * x)]
    found = SOLUTION.swiglu(x, *layers)
    wanted = [by_down * (by_gate * n / (1 + math.exp(-by_gate * n))) * (n + to_up) for n in numbers]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert sorted(calls) == ["down", "gate", "up"] and x.tolist() == numbers


@FEW
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=4), st.integers(-9, 9), st.booleans())
def test_a_block_adds_each_sublayer_to_the_stream(pairs, number, pre_norm):
    sublayers = [((lambda x, a=a: x - a), (lambda x, b=b: b * x)) for a, b in pairs]
    x = torch.tensor([[[float(number)]]])
    stream = number
    for a, b in pairs:
        stream = stream + b * (stream - a) if pre_norm else stream + b * stream - a
    assert SOLUTION.block_forward(x, sublayers, pre_norm).item() == stream and x.item() == number
