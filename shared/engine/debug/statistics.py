"""Chapter 04. What a tensor looks like, in a handful of numbers that tell a healthy layer from a sick one.

The mean and the spread say whether a layer's scale drifts; the share of zeros finds dead units; the largest magnitude finds
what will overflow; the share that is not finite says that it has. All are computed over the finite elements, in float32 at
least, so that one NaN does not hide the rest.

Left out on purpose: collecting them. `shared.engine.debug.dump` hooks a model and keeps them by name.
"""

from torch import Tensor

from shared.course.binding import exercise


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

    The body stands in solutions/04_runtime_engine.py; `course read shared.engine.debug.statistics` shows it in place.
    """
