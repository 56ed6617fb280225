"""Attention of packed rows by PyTorch's kernel for variable lengths: what it is given, and what comes of it. The kernel needs a GPU,
so in PyTorch's own operator stands another one (`varlen_stand_in`); what only a card can say is in the slice `attention` of `make gpu`."""

import pytest
import torch
from varlen_stand_in import stand_in

from shared.model.attention import eager_attention
from shared.model.document_attention import DocumentMask, attend_at_once, pack_of, pack_on_gpu, takes_documents
from shared.model.masks import Causal, Documents, Full, Window, to_attention_mask

SEQ, HEAD = 96, 8
ROWS = [[40, 30, 26], [1, 95]]
RULES = {"causal": (Causal(), True, None), "both sides": (Full(), False, None), "window": (Causal() & Window(7), True, 7)}


@pytest.fixture(scope="module")
def calls():
    """The calls of the stand-in."""
    return stand_in("cpu")


@pytest.mark.parametrize("heads, shared", [(2, 2), (4, 2)])
@pytest.mark.parametrize("dtype, near", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("name", RULES)
def test_it_computes_what_the_mask_says(name, dtype, near, heads, shared, calls):
    rule, causal, window = RULES[name]
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in ROWS])
    generator, positions = torch.Generator().manual_seed(0), torch.arange(SEQ)
    tensors = [torch.randn(2, n, SEQ, HEAD, generator=generator).to(dtype) for n in (heads, shared, shared, heads)]
    found, wanted = [], []
    for attend, results, precision in ((attend_at_once, found, dtype), (eager_attention, wanted, torch.float64)):
        *leaves, upstream = (tensor.to(precision).requires_grad_() for tensor in tensors)
        if attend is attend_at_once:
            with torch.autocast("cpu", dtype):
                out = attend(*leaves, DocumentMask(pack_of(ids, ids.device), causal, window), 0.3)
        else:
            out = attend(*leaves, to_attention_mask(rule & Documents(ids), positions, positions, sdpa=False), 0.3, 0.0)
        results += [out.detach(), *torch.autograd.grad(out, leaves, upstream.detach())]
    assert calls[-1] == (SEQ, [-1 if window is None else window - 1, 0 if causal else -1])
    for each, expected in zip(found, wanted, strict=True):
        assert each.shape == expected.shape and each.dtype == dtype
        assert (each.double() - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("head_dim, dropout, dtype, takes", [
    (64, 0.0, torch.bfloat16, True), (64, 0.1, torch.bfloat16, False), (20, 0.0, torch.bfloat16, False), (256, 0.0, torch.float16, False),
    (64, 0.0, None, False),
])  # fmt: skip
def test_a_gpu_takes_documents_in_16_bits_without_dropout(head_dim, dropout, dtype, takes):
    cuda = torch.device("cuda")
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or before)
        assert takes_documents(cuda, head_dim, dropout) == takes
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", before)


class OnCard(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


def test_a_gpu_reads_documents_on_the_host_and_only_of_long_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr("shared.model.document_attention.sent", lambda tensor, device: tensor)
    host = torch.arange(2048)[None] // 1000
    batch = {"documents": host.as_subclass(OnCard), "documents_on_host": host}
    packed = pack_on_gpu(batch)
    assert packed.starts.tolist() == [0, 1000, 2000, 2048] and packed.longest == 1024
    assert pack_on_gpu({"documents": host}) is None  # on the CPU the stack reads them itself
    assert pack_on_gpu({"documents": batch["documents"]}) is None  # the host would wait
    assert pack_on_gpu({name: tensor[:, :1024] for name, tensor in batch.items()}) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pack_on_gpu(batch) is None
