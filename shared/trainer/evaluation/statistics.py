"""Chapter 12. Standard errors of evaluation: of a mean, of bits per byte, and of the paired difference of two models.

    mean       sum v / sum w                      v: what an item adds, w: what it weighs (1, or its bytes)
    error^2    n / (n - 1) * sum (v - mean * w)^2 / (sum w)^2

With w = 1 it is the sample deviation over sqrt(n), as lm-eval has it. Documents are drawn, not bytes: a ratio's error is that of its
linearization (the delta method; Cochran 1977, section 2.11). Two models answer the same items, so their difference is computed by item:
what is hard for both cancels out (Miller 2024, "Adding Error Bars to Evals", section 4.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.course.errors import CourseError

NORMAL = 1.959964  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Measured:
    """A figure and the items that it is a mean of. weights: of the items; None for 1 each."""

    values: Sequence[float]
    weights: Sequence[float] | None = None

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / math.fsum(self.weighed)

    @property
    def weighed(self) -> Sequence[float]:
        return self.weights or [1.0] * len(self.values)

    @property
    def error(self) -> float:
        """The standard error; NaN for a single item, which says nothing of it."""
        count, mean = len(self.values), self.mean
        if count < 2:
            return math.nan
        squares = math.fsum((value - mean * weight) ** 2 for value, weight in zip(self.values, self.weighed, strict=True))
        return math.sqrt(count / (count - 1) * squares) / math.fsum(self.weighed)

    def minus(self, other: "Measured") -> "Measured":
        """The paired difference.

        Raises:
            CourseError: the two are of other items.
        """
        if len(self.values) != len(other.values) or list(self.weighed) != list(other.weighed):
            raise CourseError("Two models are compared on the same items only: evaluate both with the same tasks and the same limit.")
        return Measured([mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)], self.weights)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval, by the normal approximation."""
        return self.mean - NORMAL * self.error, self.mean + NORMAL * self.error
