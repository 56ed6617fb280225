"""Chapter 10. Quantization to INT8 and INT4 by rounding to nearest: scales and zero points, codes of a few bits, and their packing.

    code = clamp(round(w * (1 / scale)) + zero, 0, 2^bits - 1)        value = (code - zero) * scale

One scale and zero point hold for a row of a weight, or for a group of neighbouring columns of a row. Symmetric: the largest absolute value
lies at both ends of the range and the zero point in its middle. Asymmetric: the range spans the smallest to the largest number, 0 included.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared.course.bounds import PositiveInt, checked

BITS = (2, 3, 4, 8)
WORD = 32  # bits of the integers that codes are packed into


@dataclass(frozen=True)
@checked
class Rounding:
    """How numbers become codes of a few bits.

    Args:
        bits: of a code.
        group: columns that share a scale; None for a whole row.
        symmetric: whether the zero point is the middle of the codes.
        kept_in: dtype of the scales, float16 in the files that others read. A scale is rounded to it before it is used.

    Raises:
        ValueError: a value that no code or file has.
    """

    bits: int = 4
    group: PositiveInt | None = 128
    symmetric: bool = True
    kept_in: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}: give one of {', '.join(map(str, BITS))}.")

    @property
    def last(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    def columns(self, width: int) -> int:
        """Columns that share a scale, of a matrix of this width."""
        return self.group or width

    def scales(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of numbers that share them: [..., n] -> [...] and [...], in the dtype of `weights`.

        Numbers that are all 0 get the scale 1, and keep their value.
        """
        low, high = weights.amin(dim=-1).clamp(max=0), weights.amax(dim=-1).clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / self.last).to(self.kept_in).to(weights.dtype)
        if not scale.isfinite().all():
            raise ValueError(f"Weights of up to {weights.abs().max():.3g} have no finite scale in {self.kept_in}: they look broken.")
        scale = scale.where(scale > 0, 1)
        zero = torch.full_like(scale, (self.last + 1) // 2) if self.symmetric else (-low / scale).round().clamp(0, self.last)
        return scale, zero

    def encode(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Numbers to uint8 codes; the three shapes broadcast."""
        return ((weights * scale.reciprocal()).round() + zero).clamp(0, self.last).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Codes to numbers in the dtype of `scale`; the three shapes broadcast."""
    return (codes.to(scale.dtype) - zero) * scale


class QuantizedWeight(NamedTuple):
    """A weight [out, in] as codes.

    codes: [out, in] uint8. scales, zeros: [out, groups], of neighbouring columns, equally many in each group.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def values(self) -> Tensor:
        """[out, in] in the dtype of the scales."""
        grouped = self.codes.unflatten(1, (self.scales.shape[1], -1))
        return decode(grouped, self.scales.unsqueeze(-1), self.zeros.unsqueeze(-1)).flatten(1)


def round_to_nearest(weight: Tensor, rounding: Rounding) -> QuantizedWeight:
    """Quantize a weight [out, in] without looking at what it is multiplied by.

    Raises:
        ValueError: groups that do not divide the columns, or numbers that are not finite.
    """
    width = rounding.columns(weight.shape[1])
    require_groups(weight, width)
    grouped = weight.unflatten(1, (-1, width))
    scales, zeros = rounding.scales(grouped)
    codes = rounding.encode(grouped, scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(1)
    return QuantizedWeight(codes, scales, zeros)


def require_groups(weight: Tensor, width: int) -> None:
    if weight.shape[1] % width:
        raise ValueError(f"Groups of {width} do not divide {weight.shape[1]} columns: give a group that does, or null for whole rows.")
    if not weight.isfinite().all():
        raise ValueError("The weight holds numbers that are not finite: quantize a model that was trained without a failure.")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of each row as a stream of bits in int32 words: [m, n] -> [m, n / 32, bits]; n is a multiple of 32.

    The first code has the lowest bits, and 32 codes fill `bits` words, so a code of 3 bits may lie across two words. GPTQ's files have the
    same words, the other way round: [n / 32 * bits, m].
    """
    of_words = codes.to(torch.int32).unflatten(1, (-1, WORD))
    words = of_words.new_zeros(*of_words.shape[:2], bits)
    for number in range(WORD):
        word, shift = divmod(number * bits, WORD)
        words[..., word] |= of_words[..., number] << shift
        if shift + bits > WORD:
            words[..., word + 1] |= of_words[..., number] >> (WORD - shift)
    return words


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes of `pack`: [m, n / 32, bits] int32 -> [m, n] uint8."""
    codes = torch.empty(*words.shape[:2], WORD, dtype=torch.uint8, device=words.device)
    for number in range(WORD):
        word, shift = divmod(number * bits, WORD)
        low = min(bits, WORD - shift)  # a shift to the right repeats the sign, so the bits that are not the code's are masked
        code = (words[..., word] >> shift) & (2**low - 1)
        if low < bits:
            code |= (words[..., word + 1] & (2 ** (bits - low) - 1)) << low
        codes[..., number] = code
    return codes.flatten(1)
