"""Attention under a mask where heads share keys: on a GPU the kernel is never asked for both, which would leave it the slow path."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.model.attention import masked_attention


@pytest.mark.parametrize("queries, heads_of_mask, asked", [(1, 1, (2, 4, 8)), (5, 1, (8, 5, 8)), (1, 8, (8, 1, 8))])
def test_on_a_gpu_heads_are_tokens_or_keys_are_repeated(queries, heads_of_mask, asked, monkeypatch):
    """`asked`: heads, queries and width of what the kernel sees; keys have as many heads."""
    seen = []

    def kernel(q, k, v, mask=None, scale=None, enable_gqa=False):
        seen.append((tuple(q.shape[1:]), k.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        q, k = torch.empty(3, 8, queries, 8, device="cuda"), torch.empty(3, 2, 9, 8, device="cuda")
        mask = torch.empty(3, heads_of_mask, queries, 9, device="cuda")
        assert masked_attention(q, k, k, mask, 0.5).shape == q.shape
    assert seen == [(asked, asked[0], False)]


def test_on_a_cpu_it_is_the_kernel_with_shared_heads_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, length, 8, generator=generator) for heads, length in ((8, 5), (2, 9), (2, 9)))
    mask = torch.rand(3, 1, 5, 9, generator=generator) < 0.8
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5, enable_gqa=True)
    assert torch.equal(masked_attention(q, k, v, mask, 0.5), expected)
