"""Chapter 04. Gradient norm, the length of the whole gradient: one number that says whether training is healthy.

    norm = sqrt(sum over all tensors of sum(g ** 2))

It is the length of all gradients laid end to end, so it does not depend on how the parameters are cut into tensors. Clipping
(chapter 05) divides by it, monitoring shows it, and a spike in it comes before a spike in the loss.

Left out on purpose: gradients that are spread over several processes. Chapter 06 sums their squares before the root.
"""

from collections.abc import Iterable

from torch import Tensor

from shared.course.binding import exercise


@exercise("04.global_gradient_norm")
def global_gradient_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """The Euclidean length of all gradients taken together.

    Args:
        gradients: tensors of any shapes and floating dtypes, possibly a generator; None for a parameter that has none. Half
            precision is summed in float32, where 300 squared is not yet beyond the largest number. They are left as they are; a
            tensor that is given twice counts twice.

    Returns:
        [] float32 (float64 where a gradient is float64), on the gradients' device, without a graph. 0.0 where there are none. A
        gradient that holds inf or NaN makes the norm inf or NaN: it is how a broken step is noticed.

    >>> global_gradient_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]])])     # sqrt(9 + 16)
    tensor(5.)
    """
