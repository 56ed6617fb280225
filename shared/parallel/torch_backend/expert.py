"""Chapter 09. Expert parallelism on PyTorch's own differentiable all-to-all: `all_to_all_single_autograd` of its functional collectives.

What it returns is waited for where it is first used, so the exchange has no two halves. The replicas' DDP leaves experts
alone: their gradients are added over fewer ranks, by this course's engine.

Left out on purpose: these exchanges in the communication trace, where they do not appear; experts beside `fully_shard`, whose every
parameter is on one mesh.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shared.parallel.comm.communicator import Communicator


def exchange_rows_by_torch(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """What `shared.parallel.expert.all_to_all.exchange_rows` does."""
    return all_to_all_single_autograd(rows, list(received), list(sent), group.torch_group)
