"""Chapter 10. NF4, the four-bit format of QLoRA, and double quantization: quantiles of a normal distribution (Dettmers et al. 2023).

    weights    64 in a row share a scale, the largest absolute value among them; each is the nearest of 16 values in [-1, 1]
    scales     less their mean, 256 in a row share a scale; each is the nearest of 256 values in [-1, 1]

    4 + 32 / 64 = 4.5 bits a weight, and 4 + 8 / 64 + 32 / (64 * 256) = 4.127 with double quantization
"""

from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.course.binding import exercise

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a scale
OUTERMOST = 0.9677083  # the probability below the largest value: (1 - 1/32 + 1 - 1/30) / 2, since 0 and 1 would be at infinity


@exercise("10.quantize_nf4")
def quantize_nf4(weight: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to four bits, block by block (Dettmers et al. 2023, section 3).

    The numbers are taken in row-major order, `block` at a time; the last block may be shorter. A block's scale is its largest absolute
    value. Each number is multiplied by 1 / scale, and becomes the number of the nearest of the 16 `values`: the borders between two
    neighbouring values are their means, and a number on a border goes to the lower value. All of this is float32 arithmetic, in this
    order, since bitsandbytes computes so, and a division may round another way. Where a scale is below 1e-38, 1 / 1e-38 takes the place
    of 1 / scale, which would overflow: so a block of zeros has the scale 0, and its numbers become 0.0.

    Two codes share a byte: the first number's in the high four bits, the second's in the low four. With an odd number of codes the last
    low half is the code of 0.0.

    Weights fill the memory before they are quantized, so hold less than ten float32 numbers for each of them: no table of distances to all
    16 values. All blocks are computed at once.

    Args:
        weight: any shape and float dtype, all finite; left unchanged.
        values: [16] float32, ascending, from -1 to 1, with 0 among them.
        block: how many numbers share a scale.

    Returns:
        codes [ceil(n / 2)] uint8, and scales [ceil(n / block)] float32.

    >>> values = torch.cat([torch.arange(-7, 0) / 7, torch.arange(9) / 8])          # -1, six more, 0, seven more, 1
    >>> quantize_nf4(torch.tensor([0.5, -2.0, 4.0, 0.1]), values, block=2)             # codes 9 and 0, 15 and 7
    (tensor([144, 247], dtype=torch.uint8), tensor([2., 4.]))
    """


@exercise("10.dequantize_nf4")
def dequantize_nf4(codes: Tensor, scales: Tensor, values: Tensor, block: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Turn four-bit codes back into numbers: the value of each code, times the scale of its block.

    Args:
        codes: [ceil(n / 2)] uint8, two codes a byte, the first in the high four bits. With an odd n the last low half means nothing.
        scales: [ceil(n / block)] float32.
        values: [16] float32.
        block: how many numbers share a scale.
        shape: of the tensor that was quantized, with n numbers in row-major order.
        dtype: of the result; the product is computed in float32 and rounded once.

    Returns:
        A tensor of `shape` and `dtype`.

    >>> dequantize_nf4(torch.tensor([240, 15]).byte(), torch.tensor([1.0, 10.0]), torch.linspace(-1, 1, 16), 2, (3,), torch.float32)
    tensor([  1.,  -1., -10.])
    """


def nf4_values() -> Tensor:
    """The 16 values of NF4: quantiles of a normal distribution at equal steps of probability, 8 of them positive, 7 negative, and 0.

    Probabilities are float32 numbers, as in the code that made the published table: with those the values equal it bit for bit.

    Returns:
        [16] float32, ascending, from -1 to 1.
    """
    quantile = NormalDist().inv_cdf
    positive = [quantile(each) for each in torch.linspace(OUTERMOST, 0.5, 9, dtype=torch.float32)[:-1].tolist()]
    negative = [-quantile(each) for each in torch.linspace(OUTERMOST, 0.5, 8, dtype=torch.float32)[:-1].tolist()]
    values = torch.tensor(sorted([*negative, 0.0, *positive]), dtype=torch.float32)
    return values / values.max()


def dynamic_values() -> Tensor:
    """The 256 values of dynamic 8-bit numbers: a sign, a power of ten, and equal steps within it, more of them the larger the power
    (Dettmers 2016, section 2; Dettmers et al. 2022, "8-bit optimizers", section 1.3).

    Returns:
        [256] float32, ascending, from just above -1 to 1.
    """
    positive = []
    for power in range(7):
        ends = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        positive += [(10.0 ** (power - 6) * ((ends[:-1] + ends[1:]) / 2))]
    values = torch.cat(positive)
    return torch.cat([values, -values, torch.tensor([0.0, 1.0])]).sort().values


@cache
def values_on(device: torch.device, which: Any = nf4_values) -> Tensor:
    """A table of values, made once for each device."""
    return which().to(device)


class ScaleBlocks(NamedTuple):
    """What double quantization keeps of a matrix's scales apart from their codes: their mean [1], and the scale of each 256 [n / 256]."""

    mean: Tensor
    scales: Tensor


def scale_blocks(scales: Tensor) -> ScaleBlocks:
    """Statistics of the scales [n] of a whole matrix (Dettmers et al. 2023, section 3, "double quantization")."""
    mean = scales.mean().view(1)
    moved = torch.nn.functional.pad(scales - mean, (0, -len(scales) % SCALE_BLOCK))
    return ScaleBlocks(mean, moved.view(-1, SCALE_BLOCK).abs().amax(dim=1))


def encode_scales(scales: Tensor, numbers: Tensor, blocks: ScaleBlocks) -> Tensor:
    """Scales as codes of eight bits: uint8 in their shape.

    The nearest value is searched for exactly. bitsandbytes' kernel for CPUs first rounds to one of 65,536 numbers, and so takes the second
    nearest once in a thousand times; its kernel for GPUs does not.

    Args:
        scales: float32, those of some of a matrix's blocks.
        numbers: int64 in the same shape, the blocks' numbers in the whole matrix.
        blocks: the statistics of the whole matrix.
    """
    values = values_on(scales.device, dynamic_values)
    within = blocks.scales[numbers // SCALE_BLOCK].clamp(min=1e-38)
    return torch.bucketize((scales - blocks.mean) * (1 / within), (values[1:] + values[:-1]) / 2).to(torch.uint8)


def decode_scales(codes: Tensor, numbers: Tensor, blocks: ScaleBlocks) -> Tensor:
    """The scales that codes stand for: float32 in their shape. Arguments: see `encode_scales`."""
    values = values_on(codes.device, dynamic_values)
    within = blocks.scales.index_select(0, (numbers // SCALE_BLOCK).reshape(-1))
    return (values.index_select(0, codes.reshape(-1).int()) * within + blocks.mean).view(codes.shape)
