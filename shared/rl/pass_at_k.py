"""Chapter 12. pass@k: the probability that at least one of k answers to a prompt is right (Chen et al. 2021, section 2.1)."""

import math
from collections.abc import Sequence


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The unbiased estimate from n answers, of which c are right: 1 - C(n - c, k) / C(n, k).

    It is the share of all choices of k of the n answers that hold a right one. 1 - (1 - c/n)^k, which suggests itself, is too small on
    average.

    Args:
        answers: n, at least k.
        right: c of them.
        k: at least 1.

    Raises:
        ValueError: numbers that cannot be.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4)
    (0.25, 0.5, 0.0)
    """
    if not (0 <= right <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} right: k must be 1 to the number of answers, of which so many are right.")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def mean_pass_at_k(right: Sequence[int], answers: int, k: int) -> float:
    """Mean over prompts. right: of each prompt's answers, so many are right."""
    return sum(pass_at_k(answers, each, k) for each in right) / len(right)
