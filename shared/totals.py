"""Chapter 01. Totals of a pass over data (loss reduction): loss sum, token count, and metric sums, to be divided once at the end.

Sums are kept, never means: sums of micro-batches, of ranks and of pipeline stages add, means do not. An
average is divided once, at the end, by the number of tokens that counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer


class Totals(NamedTuple):
    """What an objective returns for one micro-batch, and what a step or an evaluation returns for all of them.

    loss_sum: [] float, nats, summed over the tokens that count.
    token_count: [] int64, how many tokens that is.
    metrics: name -> [] tensor, each also a sum over the tokens that count.
    """

    loss_sum: Tensor
    token_count: Tensor
    metrics: dict[str, Tensor]

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.loss_sum.item() / self.token_count.item()

    def mean_metrics(self) -> dict[str, float]:
        """Each metric per token."""
        return {name: value.item() / self.token_count.item() for name, value in self.metrics.items()}


# The parts of a training step, by the shape of their calls. `shared.loop` says what each of them does.
Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], Totals]
Runner = Callable[[nn.Module, Sequence[Batch], Objective], Totals]
Reducer = Callable[[nn.Module, Totals], Totals]
Updater = Callable[[nn.Module, Optimizer, Tensor], None]


def add_totals(parts: Iterable[Totals]) -> Totals:
    """The totals of several micro-batches, detached from their graphs.

    Raises:
        ValueError: `parts` is empty, so there is no device or dtype to make a zero of.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("There are no micro-batches to add up: the data source is empty.")
    metrics = {name: sum(part.metrics[name].detach() for part in parts) for name in parts[0].metrics}
    return Totals(sum(part.loss_sum.detach() for part in parts), sum(part.token_count for part in parts), metrics)


def bits_per_byte(loss_sum: float | Tensor, byte_count: int | Tensor) -> float:
    """Nats over a text of `byte_count` bytes as bits per byte, which compares models with different tokens."""
    return float(loss_sum) / (math.log(2) * int(byte_count))
