"""The experts' products alone: the ways to compute them agree, also without rows, and compute no gradient that nobody needs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from brute_force import CONFIG
from test_expert_exchange import Operations
from test_mixture_layer import numbers

from shared.moe import experts
from shared.moe.config import MixtureConfig
from shared.moe.experts import BLOCK, FEWEST_ROWS, PRODUCTS, Experts, grouped_product, in_blocks, loop_product, processor_is_amds


@pytest.fixture(params=[True, False], ids=["AMD", "another processor"])
def amd(request, monkeypatch) -> bool:
    monkeypatch.setattr(experts, "processor_is_amds", lambda: request.param)
    return request.param


@pytest.mark.parametrize("vendor, expected", [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_the_processors_maker_is_read_where_linux_says_it(vendor, expected, monkeypatch):
    monkeypatch.setattr(experts.Path, "read_text", lambda self: f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(experts.Path, "exists", lambda self: True)
    assert processor_is_amds.__wrapped__() is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[4, 0, 3, 0], [0, 0, 0, 7], [0, 0, 0, 0]], ids=str)
def test_products_agree_and_experts_without_tokens_get_a_gradient_of_zero(counts, dtype, amd):
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
def test_products_compute_only_the_gradients_that_are_needed(trained, amd):
    """Frozen experts, or rows that come from something frozen: half of the backward pass. oneDNN has a product for each busy expert."""
    rows, weight, counts = numbers(7, 8).float(), numbers(3, 16, 8, seed=1).float(), torch.tensor([4, 0, 3])
    ({"rows": rows, "weight": weight}[trained]).requires_grad_()
    out, upstream = grouped_product(rows, weight, counts), numbers(7, 16, seed=2).float()
    with Operations() as operations:
        out.backward(upstream)
    assert (operations.names.count("mkldnn_linear"), operations.names.count("_grouped_mm")) == ((2, 0) if amd else (0, 1))
    expected = [each.detach().clone().requires_grad_() for each in (rows, weight)]
    loop_product(*expected, counts).backward(upstream)
    for found, wanted in zip((rows, weight), expected, strict=True):
        if found.requires_grad:
            torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (12, 12)])
def test_rows_whose_way_in_or_out_is_no_multiple_of_16_bytes_go_through_the_loop(sizes, monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: pytest.fail("no GPU has a kernel for these rows"))
    rows, weight, counts = numbers(6, sizes[0]).bfloat16(), numbers(2, sizes[1], sizes[0]).bfloat16(), torch.tensor([2, 4])
    torch.testing.assert_close(grouped_product(rows, weight, counts), loop_product(rows, weight, counts), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[295, 0, 89], [0, 0, 384], [200, 97, 86], [0, 0, 0]], ids=str)
def test_low_precision_on_a_cpu_multiplies_many_rows_in_blocks_and_finds_the_same(counts, dtype):
    """oneDNN compiles a kernel for each number of rows; the numbers of different steps must recur."""
    layer = Experts(replace(CONFIG, experts=MixtureConfig(3, 16)).resolved())
    with torch.no_grad():
        for seed, weight in enumerate(layer.parameters()):
            weight.copy_(0.2 * numbers(*weight.shape, seed=seed))
    layer, seen = layer.to(dtype), []
    layer.up_proj.register_forward_hook(lambda module, rows, out, *_: seen.append(out.shape[0]))
    rows, counts = numbers(sum(counts), CONFIG.hidden_size, seed=7).to(dtype).requires_grad_(), torch.tensor(counts)
    everything = [rows, *layer.parameters()]

    def found(out):
        return [out, *torch.autograd.grad((out * numbers(*out.shape, seed=8)).sum(), everything, materialize_grads=True)]

    for ours, plain in zip(found(layer(rows, counts)), found(layer.feed_forward(rows, counts)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
    padded = -(-counts // BLOCK) * BLOCK if len(rows) >= FEWEST_ROWS * 3 else counts
    assert seen == [padded.sum(), counts.sum()]


def test_blocks_hold_each_experts_rows_first_and_then_zeros():
    rows, counts = numbers(5, 2), torch.tensor([0, 3, 0, 2])
    padded, longer, places = in_blocks(rows, counts)
    assert longer.tolist() == [0, BLOCK, 0, BLOCK] and places.tolist() == [0, 1, 2, BLOCK, BLOCK + 1]
    assert padded[places].equal(rows) and padded.count_nonzero() == rows.numel()
