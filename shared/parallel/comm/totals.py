"""Chapter 06. All-reduce of totals: loss sums, token counts and metrics over the ranks, in one small vector of float64.

Totals are sums, so the sums of ranks add, and counts are exact in float64.
"""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.totals import Totals


def add_over(totals: Totals, group: Communicator) -> Totals:
    """The totals over the ranks of a group, on each of them. One all-reduce."""
    return add_with(totals, torch.empty(0), group)[0]


def add_with(totals: Totals, counts: Tensor, group: Communicator) -> tuple[Totals, Tensor]:
    """Totals and other counts [n] over the ranks of a group, in one all-reduce. The counts come back as float64 on the CPU."""
    if group.size == 1:  # perhaps on a device that knows no float64
        return totals, counts.double().cpu()
    values = [totals.loss_sum, totals.token_count, *totals.metrics.values()]
    device = totals.loss_sum.device
    packed = torch.cat([torch.stack([value.detach().to(device, torch.float64) for value in values]), counts.to(device, torch.float64)])
    group.all_reduce(packed)
    loss_sum, token_count, *metrics = (total.to(value.dtype) for total, value in zip(packed[: len(values)], values, strict=True))
    return Totals(loss_sum, token_count, dict(zip(totals.metrics, metrics, strict=True))), packed[len(values) :].cpu()
