"""Chapter 10. LoRA under tensor parallelism: how the two factors of an addition are cut, and whose gradients are summed over ranks.

    column-parallel    y_r = x W_r^T + s (x A^T) B_r^T               W and B are cut by output features, A is whole on each rank
    row-parallel       y = sum over r of x_r W_r^T + s (x_r A_r^T) B^T        W and A are cut by input features, B is whole

In a row-parallel layer the addition is added before the one all-reduce that the layer has anyway.
"""

from typing import NamedTuple

from shared.course.binding import exercise


class FactorPlan(NamedTuple):
    """How tensor-parallel ranks hold a factor. cut: the dimension along which each holds a slice; None where each holds all of it.
    summed: whether the ranks' gradients of it are parts, which must be added up after the backward pass."""

    cut: int | None
    summed: bool


@exercise("10.lora_sharding")
def lora_sharding(cut: int | None) -> tuple[FactorPlan, FactorPlan]:
    """Decide how LoRA's factors A [r, in] and B [out, r] follow a weight W [out, in] that tensor parallelism cuts.

    Where the weight is cut by output features, the ranks get the same input x: it passes through f before the layer, and in the backward
    pass f sums the gradients of x. Where it is cut by input features, each rank gets its own. The ranks' results are
    those of the whole layer, and the addition may not communicate: only the layer's own f or g does.

    Args:
        cut: the dimension along which the weight is cut: 0 for output features (column-parallel, and a head cut by tokens), 1 for input
            features (row-parallel); None for a weight that every rank holds whole, and with which all compute the same.

    Returns:
        The plan for A and the plan for B. Dimensions are counted from 0. A factor is cut where it can be, so that no rank computes or
        holds what it has no use for.

    >>> lora_sharding(None)
    (FactorPlan(cut=None, summed=False), FactorPlan(cut=None, summed=False))
    """
