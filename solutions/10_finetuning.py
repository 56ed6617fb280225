"""Solutions of chapter 10. Each body with the reason why it is written this way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.finetune.lora_parallel import FactorPlan


# Chats


def assistant_mask(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> Tensor:
    """A token may straddle the border of an answer, and is then the only one that can teach its part of it: it counts. Two spans overlap
    where each starts before the other stops, which is never so for an empty one only if that is asked."""
    trained = [any(max(start, first) < min(stop, last) for first, last in answers) for start, stop in offsets]
    return torch.tensor(trained, dtype=torch.bool)


# LoRA


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora_A: Tensor, lora_B: Tensor, scaling: float, dropout: float) -> Tensor:
    """Two narrow products cost 2 r (in + out) operations a token; making B A first would cost r in out, and hold another matrix."""
    narrow = F.linear(F.dropout(x, dropout) if dropout else x, lora_A)
    return F.linear(x, weight, bias) + scaling * F.linear(narrow, lora_B)


def merge_lora(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """A small update that is rounded to 16 bits before it is added is rounded twice, and may vanish."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scaling * (lora_B.to(wide) @ lora_A.to(wide))).to(weight.dtype)


def lora_sharding(cut: int | None) -> tuple[FactorPlan, FactorPlan]:
    """The factor on the side of the cut is cut, and has its whole gradient. The other one meets a part of what it would meet in one
    process: A the gradients that come through B's slice, B the narrow activations that A's slice makes."""
    a_cut, b_cut = cut == 1, cut == 0
    return FactorPlan(1 if a_cut else None, b_cut), FactorPlan(0 if b_cut else None, a_cut)


# Four bits


def quantize_nf4(weight: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The borders between neighbouring values are sorted, so a binary search finds the nearest value without a distance to each of the 16.
    `bucketize` takes a number on a border to the lower value."""
    flat = weight.reshape(-1).float()
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = blocks.abs().amax(dim=1)
    quotients = (blocks * (1 / scales.clamp(min=1e-38)).unsqueeze(1)).reshape(-1)[: len(flat)]
    codes = torch.bucketize(F.pad(quotients, (0, len(flat) % 2)), (values[1:] + values[:-1]) / 2, out_int32=True)
    pairs = codes.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], scales


def dequantize_nf4(codes: Tensor, scales: Tensor, values: Tensor, block: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A byte is one of 256 pairs of values. Each pair is two float32 numbers, so it is looked up as one number of 64 bits: eight times as
    fast as code by code. The last block may be short."""
    numbers = torch.Size(shape).numel()
    pairs = torch.cartesian_prod(values, values).view(torch.int64).view(-1)
    each = pairs.index_select(0, codes.int()).view(torch.float32)[:numbers]
    full = numbers // block
    each[: full * block].view(full, block).mul_(scales[:full].unsqueeze(1))
    each[full * block :].mul_(scales[full:])
    return each.view(shape).to(dtype)


# Post-training quantization


def gptq_column(weights: Tensor, column: int, factor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """One outer product moves all later columns. The factor's row holds what of an error each of them can make up for."""
    quantized = quantize(weights[:, column])
    error = (weights[:, column] - quantized) / factor[column, column]
    weights[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
    weights[:, column] = quantized
    return error


def awq_scales(means: Tensor, loss_of: Callable[[Tensor], float], ratios: Sequence[float]) -> Tensor:
    """Comparisons with NaN are false, and nothing infinite is less than infinity, so neither ever becomes the best."""
    best, least = None, float("inf")
    for ratio in ratios:
        scales = means.pow(ratio).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = loss_of(scales)
        if loss < least:
            best, least = scales, loss
    if best is None:
        raise ValueError("No ratio gives a finite loss: look for infinite weights or activations.")
    return best
