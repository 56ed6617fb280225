"""Attention kernels by mask and precision: which of PyTorch's ran, and that it agrees with attention written out.

The kernel is read off the operators that the profiler sees. Forward and backward are compared with `grouped_query_attention` in float64 on
the CPU, on inputs that were rounded to the precision before, so that what differs is the computation alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpu_machine import Machine
from gpu_rows import Row
from torch import Tensor

from shared.model.attention import eager_attention, sdpa_attention
from shared.model.document_attention import pack_of
from shared.model.masks import Both, Causal, Documents, Full, Mask, Padding, Prefix, Window, to_attention_mask
from shared.model.rope import alibi_bias

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # 8 bits of mantissa, 11 bits


@dataclass
class Case:
    """groups: query heads for each key-value head. biased: ALiBi. varlen: by the kernel for variable lengths, as packed rows in a run."""

    rule: Mask
    groups: int = 1
    biased: bool = False
    varlen: bool = False


def cases_of(rows: int, seq: int) -> dict[str, Case]:
    documents = Documents((torch.arange(seq) // (seq // 4)).repeat(rows, 1))
    lengths = torch.full((rows, 1), seq // 2)
    some = Padding(torch.arange(seq) < lengths)
    nowhere = Padding((torch.arange(seq) < lengths) & (torch.arange(rows)[:, None] > 0))
    return {
        "causal": Case(Causal()),
        "causal, grouped queries": Case(Causal(), groups=4),
        "full": Case(Full()),
        "documents": Case(Causal() & documents),
        "documents, grouped queries": Case(Causal() & documents, groups=4),
        "sliding window": Case(Causal() & Window(seq // 4)),
        "documents and window": Case(Causal() & documents & Window(seq // 8)),
        "prefix": Case(Causal() | Prefix(seq // 4)),
        "padding": Case(some),
        "a row that may look nowhere": Case(nowhere),
        "documents, variable lengths": Case(Causal() & documents, varlen=True),
        "documents, variable lengths, grouped queries": Case(Causal() & documents, groups=4, varlen=True),
        "documents, variable lengths, both ways": Case(Full() & documents, varlen=True),
        "documents, variable lengths, window": Case(Causal() & documents & Window(seq // 8), varlen=True),
        "ALiBi": Case(Causal(), biased=True),
        "ALiBi, documents": Case(Causal() & documents, biased=True),
    }


def run(machine: Machine, small: bool) -> Iterator[Row]:
    rows, heads, seq, size = (2, 4, 32, 16) if small else (2, 8, 1024, 64)
    for name, case in cases_of(rows, seq).items():
        for precision, tolerance in TOLERANCES.items():
            if case.varlen and precision.startswith("float") and precision != "float16":
                continue  # it is for 16 bits
            if precision == "float64" and not small:
                seq_here = seq // 4  # the reference and the kernel that is written out hold [heads, seq, seq]
                here = cases_of(rows, seq_here)[name]
            else:
                seq_here, here = seq, case
            yield one_row(machine, f"{name}, {precision}", here, precision, tolerance, (rows, heads, seq_here, size), small)
            machine.free()


def one_row(machine: Machine, what: str, case: Case, precision: str, tolerance: float, shape: tuple, small: bool) -> Row:
    rows, heads, seq, size = shape
    dtype, generator = getattr(torch, precision), torch.Generator().manual_seed(0)
    shapes = [(rows, heads, seq, size)] + [(rows, heads // case.groups, seq, size)] * 2 + [(rows, heads, seq, size)]
    tensors = [torch.randn(*each, generator=generator).to(dtype) for each in shapes]
    expected = forward_and_backward(eager_attention, case, dtype, [tensor.double() for tensor in tensors])
    there = [tensor.to(machine.device) for tensor in tensors]
    attend = partial(forward_and_backward, sdpa_attention, case, dtype, there)
    kernel = machine.attention_kernels(attend)
    found = attend()
    far = max(relative(a.double().cpu(), b) for a, b in zip(found, expected, strict=True))
    seconds = machine.seconds(attend, repeats=1 if small else 10, warmup=0 if small else 3)
    figures = {"kernel": kernel, "difference": far, "ms, forward and backward": seconds * 1e3 if machine.is_gpu else None}
    return Row(what, figures, far <= tolerance, f"at most {tolerance:g} of result and gradients")


def forward_and_backward(attend, case: Case, rounded: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values. rounded: what a bias is rounded to, as the kernel's would be."""
    *inputs, upstream = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    queries = leaves[0]
    positions = torch.arange(queries.shape[2], device=queries.device)
    bias = alibi_bias(queries.shape[1], positions, positions).to(rounded).to(queries.dtype) if case.biased else None
    rule = on(packed(case.rule, queries.device) if case.varlen else case.rule, queries.device)
    mask = to_attention_mask(rule, positions, positions, bias, sdpa=attend is sdpa_attention, documents=case.varlen)
    with torch.autocast(queries.device.type, rounded, enabled=case.varlen and attend is sdpa_attention):
        mixed = attend(*leaves, mask, queries.shape[-1] ** -0.5, 0.0)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream)]


def packed(rule: Mask, device: torch.device) -> Mask:
    """A rule whose documents were read on the host, as `pack_on_gpu` does."""
    if isinstance(rule, Both):
        return Both(packed(rule.left, device), packed(rule.right, device))
    return Documents(rule.ids, pack_of(rule.ids, device)) if isinstance(rule, Documents) else rule


def on(rule: Mask, device: torch.device) -> Mask:
    """A rule with its tensors on a device."""
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in vars(rule).items()}
    return type(rule)(**{key: on(value, device) if isinstance(value, Mask) else value for key, value in moved.items()})


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
