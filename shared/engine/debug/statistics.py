"""Chapter 04. Activation statistics and a histogram of magnitudes: a tensor in a few numbers that tell a healthy layer from a sick one.

The mean and the spread say whether a layer's scale drifts; the share of zeros finds dead units; the largest magnitude finds
what will overflow; the share that is not finite says that it has. All are computed over the finite elements, in float32 at
least, so that one NaN does not hide the rest.

The histogram's bins are powers of two. A floating-point number is a fraction times a power of two, so its bin is its exponent, read off
and not computed. The bins are the same for every tensor and every step, so histograms can be compared, added and stacked. float16 loses
everything below 2^-24 and overflows at 2^16: what lies outside its range is seen at once.
"""

import torch
from torch import Tensor

from shared.course.binding import exercise

LOWEST, HIGHEST = -40, 16
BINS = HIGHEST - LOWEST + 2


@exercise("04.activation_statistics")
def activation_statistics(x: Tensor) -> dict[str, float]:
    """Statistics of one tensor: weights, gradients or activations.

    Args:
        x: any shape, any floating dtype, at least one element. It may require a gradient; it is left as it is.

    Returns:
        `mean` and `std` (population: divided by the count) of the finite elements, `rms` (root of their mean square), `abs_max`,
        `zeros` (share of all elements that are exactly 0), `not_finite` (share that is inf or NaN). Half precision is computed in
        float32, float64 in float64. Where no element is finite, mean, std, rms and abs_max are NaN.

    Raises:
        ValueError: x has no elements.

    >>> activation_statistics(torch.tensor([0.0, 0.0, -2.0, 2.5, 3.0, 3.5, 3.5, float("inf")]))
    {'mean': 1.5, 'std': 2.0, 'rms': 2.5, 'abs_max': 3.5, 'zeros': 0.25, 'not_finite': 0.125}
    """


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
