"""Chapter 09. Expert parallelism on PyTorch's own differentiable all-to-all: `all_to_all_single_autograd` of its functional collectives.

What it returns is waited for where it is first used, so rows that travel back need no second half (`arrived`). The replicas' DDP leaves
experts alone: their gradients are added over fewer ranks, by this course's engine.

Left out on purpose: these exchanges in the communication trace, where they do not appear; experts beside `fully_shard`, whose every
parameter is on one mesh.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shared.parallel.expert.axis import SpreadExperts


class TorchSpreadExperts(SpreadExperts):
    """The experts of all ranks of a group, between PyTorch's exchanges."""

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return all_to_all_single_autograd(rows, list(received), list(sent), self.group.torch_group)

    begin = exchange

    def arrived(self, rows: Tensor) -> Tensor:
        return rows
