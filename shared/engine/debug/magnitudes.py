"""Chapter 04. How the sizes of a tensor's elements are spread: a histogram whose bins are powers of two.

A floating-point number is a fraction times a power of two, so its bin is its exponent, read off and not computed. The bins are the
same for every tensor and every step; histograms can be compared, added and stacked. float16 loses everything below 2^-24 and
overflows at 2^16: what lies outside its range is seen at once.
"""

import torch
from torch import Tensor

LOWEST, HIGHEST = -40, 16
BINS = HIGHEST - LOWEST + 2


def magnitude_histogram(x: Tensor) -> list[int]:
    """How many finite elements lie in each bin, `BINS` numbers.

    Bin 0 holds |x| < 2^LOWEST, zeros included; bin i, 2^(LOWEST + i - 1) <= |x| < 2^(LOWEST + i); the last, |x| >= 2^HIGHEST.

    >>> histogram = magnitude_histogram(torch.tensor([0.0, 1.0, -1.5, 2.0, float("nan")]))
    >>> histogram[0], histogram[-LOWEST + 1], histogram[-LOWEST + 2]
    (1, 2, 1)
    """
    x = x.detach().flatten()
    x = x if x.dtype == torch.float64 else x.float()
    exponents = torch.frexp(x).exponent.long()  # |x| = fraction * 2^exponent, 0.5 <= fraction < 1
    bins = torch.where(x == 0, 0, (exponents - LOWEST).clamp(0, BINS - 1))
    return torch.bincount(bins[x.isfinite()], minlength=BINS).tolist()


def moved_share(before: list[int], after: list[int]) -> float:
    """The share of elements that would have to change bins to make one histogram the other: 0 to 1 (total variation distance)."""
    totals = sum(before) or 1, sum(after) or 1
    return sum(abs(a / totals[0] - b / totals[1]) for a, b in zip(before, after, strict=True)) / 2
