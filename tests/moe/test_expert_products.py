"""The experts' products alone: the ways to compute them agree, also without rows, and compute no gradient that nobody needs."""

import pytest
import torch
import torch.nn.functional as F
from test_expert_exchange import Operations
from test_mixture_layer import numbers

from shared.moe.experts import PRODUCTS, grouped_product, loop_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[4, 0, 3, 0], [0, 0, 0, 7], [0, 0, 0, 0]], ids=str)
def test_products_agree_and_experts_without_tokens_get_a_gradient_of_zero(counts, dtype):
    """After memory was poisoned: a kernel that leaves a result as the memory was would show."""
    torch.full((1 << 20,), torch.nan)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    weight, rows = numbers(4, 16, 8).to(dtype), numbers(sum(counts), 8, seed=1).to(dtype)
    expected = None
    for product in PRODUCTS.values():
        own, x = weight.clone().requires_grad_(), rows.clone().requires_grad_()
        out = product(x, own, torch.tensor(counts))
        (out * numbers(*out.shape, seed=2).to(dtype)).sum().backward()
        assert out.shape == (sum(counts), 16) and not own.grad[torch.tensor(counts) == 0].any()
        expected = expected or (out, own.grad, x.grad)
        for found, wanted in zip((out, own.grad, x.grad), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("trained", ["rows", "weight"])
def test_products_compute_only_the_gradients_that_are_needed(trained):
    """Frozen experts, or rows that come from something frozen: half of the backward pass."""
    rows, weight, counts = numbers(7, 8).float(), numbers(3, 16, 8, seed=1).float(), torch.tensor([4, 0, 3])
    ({"rows": rows, "weight": weight}[trained]).requires_grad_()
    out = grouped_product(rows, weight, counts)
    with Operations() as operations:
        out.sum().backward()
    assert operations.names.count("mkldnn_linear") == 2, "one product for each expert with rows"
    expected = [each.detach().clone().requires_grad_() for each in (rows, weight)]
    loop_product(*expected, counts).sum().backward()
    for found, wanted in zip((rows, weight), expected, strict=True):
        if found.requires_grad:
            torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (12, 12)])
def test_rows_whose_way_in_or_out_is_no_multiple_of_16_bytes_go_through_the_loop(sizes, monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: pytest.fail("no GPU has a kernel for these rows"))
    rows, weight, counts = numbers(6, sizes[0]).bfloat16(), numbers(2, sizes[1], sizes[0]).bfloat16(), torch.tensor([2, 4])
    torch.testing.assert_close(grouped_product(rows, weight, counts), loop_product(rows, weight, counts), rtol=0, atol=0)
