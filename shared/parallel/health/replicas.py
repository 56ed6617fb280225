"""Chapter 06. Replica consistency check, against silent data corruption: ranks compare weights that should be the same.

Ranks that add up the same gradients take the same steps, bit for bit. Where one does not (a forgotten parameter, a random number, a
broken memory chip), nothing fails: each rank trains a model of its own, and every step adds up gradients of different models. So each rank
sums up the bits of its weights, and the sums are compared.

    checksum of a parameter = sum over rows i of (2 i + 1) * (sum of the row's bits, read as whole numbers)    mod 2^64

A single bit always changes it. Left out on purpose: changes that cancel each other within a row, which a real hash would see, at a cost.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared.engine.callbacks import Callback
from shared.parallel.comm.communicator import CommunicationError, Communicator
from shared.parallel.comm.trace import CommTrace
from shared.parallel.holders import Holders
from shared.totals import Batch

if TYPE_CHECKING:
    from shared.parallel.strategy import ParallelStrategy

WHOLE_NUMBERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


class ReplicasDiffer(CommunicationError):
    """Ranks that should hold the same weights do not; the message says which, and where first."""


class ReplicaCheck(Callback):
    """Compares what several ranks hold alike: weights of replicas, norms under tensor parallelism. It runs before a step is saved, so what
    differs is not.

    Args:
        strategy: whose weights are compared.
        check_every: steps.
    """

    every_rank = True

    def __init__(self, strategy: "ParallelStrategy", check_every: int = 100):
        self.strategy, self.check_every = strategy, check_every

    def on_step(self, engine: Any) -> None:
        if engine.step % self.check_every == 0:
            strategy = self.strategy
            held = strategy.state.state_dict(keep_vars=True).items()  # buffers may be each rank's own
            weights = {name: tensor for name, tensor in held if isinstance(tensor, torch.nn.Parameter)}
            require_equal(weights, strategy.holders, strategy.mesh.world, engine.step)


class StepCounter(Callback):
    """Notes the step in the comm trace, and so for the heartbeat."""

    every_rank = True

    def __init__(self, trace: CommTrace):
        self.trace = trace

    def on_batch(self, engine: Any, microbatches: Sequence[Batch]) -> None:
        self.trace.step = engine.step + 1


def require_equal(weights: Mapping[str, Tensor], holders: Holders, world: Communicator, step: int = 0) -> None:
    """Compare each tensor over the ranks that hold the same part of it; every rank calls it. Eight bytes for each tensor and rank travel.

    Args:
        weights: this rank's, by name.
        holders: who holds what of them.

    Raises:
        ReplicasDiffer: on every rank, the same sentence.
    """
    if all(len(ranks) == 1 for ranks in holders.ranks.values()):
        return
    names = list(holders.shapes)
    parts = [checksum(weights[name]) if name in weights else None for name in names]
    device = next(part.device for part in parts if part is not None)
    own = torch.stack([torch.zeros((), dtype=torch.int64, device=device) if part is None else part for part in parts])
    everyone = own.new_empty(world.size, len(names))
    world.all_gather(everyone, own)
    sums = dict(zip(names, everyone.T.tolist(), strict=True))
    for (name, _), ranks in holders.ranks.items():
        if len({sums[name][rank] for rank in ranks}) > 1:
            when = f"after step {step}, " if step else ""
            raise ReplicasDiffer(f"{when}{difference(name, [sums[name][rank] for rank in ranks], ranks)}")


def checksum(tensor: Tensor) -> Tensor:
    """[] int64, of the tensor's bits; 0 of an empty one. Bits are read as the longest whole numbers that fill a row, which is fastest."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous()
    size = next(size for size in WHOLE_NUMBERS if rows[:1].nbytes % size == 0)
    if rows.storage_offset() * rows.element_size() % size:  # a piece of a larger tensor, which begins between two such numbers
        rows = rows.clone()
    sums = rows.view(WHOLE_NUMBERS[size]).sum(dim=1, dtype=torch.int64)
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def difference(name: str, sums: Sequence[int], members: Sequence[int]) -> str:
    """The sentence for a parameter whose checksums differ. The fewer are wrong; of as many, those that differ from the first."""
    counts = Counter(sums)
    right = max(sums, key=lambda each: (counts[each], each == sums[0]))
    odd = [rank for rank, each in zip(members, sums, strict=True) if each != right]
    same = [rank for rank, each in zip(members, sums, strict=True) if each == right]
    ranks, others = ("rank" if len(each) == 1 else "ranks" for each in (odd, same))
    return (
        f"the weights of {ranks} {', '.join(map(str, odd))} are not those of {others} {', '.join(map(str, same))}; "
        f"the first parameter that differs is {name}. Go on from the last checkpoint, with fewer steps between checks to find the step."
    )
