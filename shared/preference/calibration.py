"""Chapter 11. Calibration of a reward model: the reliability curve and the expected calibration error on held-out pairs (Guo et al. 2017).

Under the Bradley-Terry model a difference d of two rewards is a probability: the answer with the higher reward is preferred with
sigmoid(|d|), at least 1/2. A calibrated model that says 0.8 is right about 80 pairs of 100. Training on few pairs, or for long, makes
rewards larger than they deserve, and accuracy does not show it.

Pairs are counted in bins of confidence, and all that is kept are sums, so any layout and any number of batches give the same curve.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.figures import HELD_OUT, REFERENCE
from shared.preference.reward_model import on_pairs
from shared.totals import Batch, Totals

BINS = 10  # between confidences 0.5 and 1


@dataclass(frozen=True)
class Reliability:
    """The reliability curve: pairs in equal bins of confidence from 0.5 to 1.

    counts: how many pairs. confidences, accuracies: their mean confidence and the share that was right; nan in an empty bin.
    """

    counts: tuple[int, ...]
    confidences: tuple[float, ...]
    accuracies: tuple[float, ...]

    @property
    def expected_calibration_error(self) -> float:
        """The mean over pairs of |accuracy - confidence| of their bin (Guo et al. 2017, equation 3)."""
        bins = zip(self.counts, self.confidences, self.accuracies, strict=True)
        return sum(count * abs(accuracy - confidence) for count, confidence, accuracy in bins if count) / sum(self.counts)

    @property
    def accuracy(self) -> float:
        return sum(count * accuracy for count, accuracy in zip(self.counts, self.accuracies, strict=True) if count) / sum(self.counts)


def bin_sums(differences: Tensor, counted: Tensor, bins: int = BINS) -> Tensor:
    """Pairs in each bin, the sum of their confidences and how many were right: [3, bins], in the dtype of `differences`.

    Args:
        differences: the reward of the preferred answer less that of the other one, any shape. A tie is right by half.
        counted: the same shape, bool.
    """
    differences = differences.masked_fill(~counted, 0)
    confidences = differences.abs().sigmoid()
    right = (differences.sign() + 1) / 2
    places = ((confidences - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    facts = [counted.to(differences.dtype), confidences.masked_fill(~counted, 0), right.masked_fill(~counted, 0)]
    sums = differences.new_zeros(3, bins)
    for row, fact in zip(sums, facts, strict=True):
        row.scatter_add_(0, places.flatten(), fact.flatten())
    return sums


def calibration_objective(model: nn.Module, batch: Batch) -> Totals:
    """An objective for evaluations (`shared.loop.evaluate`): the `bin_sums` of packed pairs, as metrics, in any layout."""

    def sums_of(chosen: Tensor, rejected: Tensor, real: Tensor) -> Totals:
        sums = bin_sums((chosen - rejected).detach(), real)
        return Totals(sums.new_zeros(()), real.sum(), {f"bin {place}": value for place, value in enumerate(sums.flatten())})

    return on_pairs(model, batch, sums_of)


def reliability(found: Totals | Tensor) -> Reliability:
    """The curve, from the totals of `calibration_objective` or from `bin_sums`."""
    sums = found if isinstance(found, Tensor) else torch.stack(list(found.metrics.values())).view(3, -1)
    counts, *others = sums.tolist()
    means = (tuple(each / count if count else math.nan for each, count in zip(values, counts, strict=True)) for values in others)
    return Reliability(tuple(round(count) for count in counts), *means)


def draw_reliability(axes: Any, found: Reliability) -> None:
    """Draw a reliability curve: a point for each bin, as large as it has many pairs, and the diagonal of perfect calibration.

    Args:
        axes: matplotlib's.
    """
    axes.plot([0.5, 1], [0.5, 1], color=REFERENCE, linestyle="--", label="calibrated")
    largest = max(found.counts)
    sizes = [120 * count / largest for count in found.counts]
    label = f"held-out pairs: error {found.expected_calibration_error:.3f}, accuracy {found.accuracy:.3f}"
    axes.plot(found.confidences, found.accuracies, color=HELD_OUT, label=label)
    axes.scatter(found.confidences, found.accuracies, s=sizes, color=HELD_OUT)
    axes.set(xlabel="confidence, sigmoid of the difference of rewards", ylabel="share that was right", xlim=(0.49, 1.01))
    axes.legend()
