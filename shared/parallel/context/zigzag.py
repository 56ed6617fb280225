"""Chapter 07. Zigzag order: which positions of a sequence each rank of context parallelism has, so that causal attention is shared evenly.

    2 n chunks for n ranks; rank r has chunks r and 2 n - 1 - r              4 ranks:   0 7 | 1 6 | 2 5 | 3 4

Under a causal mask the last quarter of a sequence looks at seven times as many keys as the first one. An early and a late chunk together
look at the same number on every rank. A position keeps its place in the whole sequence as its index: rotations, learned positions, biases
and masks all go by that, and by nothing local.

Left out on purpose: other shares for other masks. Packed documents of very unequal length leave some ranks with more work than others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError, nearest_multiples
from shared.parallel.comm.communicator import Communicator
from shared.totals import Batch, Objective, Totals

READ_WHOLE = ("documents", "valid")  # entries of a batch that masks read, at indices that count from the start of the sequence


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The early and the late chunk of a rank, of 2 * ranks."""
    return rank, 2 * ranks - 1 - rank


def require_divisible(length: int, ranks: int, setting: str = "The sequence") -> None:
    """Refuse a sequence that cannot be cut into two equal chunks for each rank.

    Raises:
        SettingError: with the nearest lengths that can.
    """
    chunks = 2 * ranks
    if length % chunks:
        raise SettingError(
            f"{setting} has {length} positions, and parallel.context_parallel {ranks} cuts it into {chunks} equal chunks, two for each "
            f"rank: give {nearest_multiples(length, chunks)}, or other ranks."
        )


class SequenceShare:
    """One rank's share of every sequence.

    Attributes:
        group: the ranks that share each sequence, the mesh's cp.
        length: of the whole sequence, while an objective works on a share of it; None outside, where models get whole sequences.
    """

    def __init__(self, group: Communicator):
        self.group, self.length = group, None

    @contextmanager
    def of(self, length: int) -> Iterator[None]:
        """Within it, what the model is given are this rank's positions of sequences of `length`."""
        self.length = length
        try:
            yield
        finally:
            self.length = None

    def indices(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """[length / ranks] int64: where this rank's positions stand in the whole sequence."""
        chunks = torch.arange(length, device=device).view(2 * self.group.size, -1)
        return chunks[list(own_chunks(self.group.rank, self.group.size))].flatten()

    def cut(self, batch: Batch) -> Batch:
        """This rank's positions of a batch: of every entry [batch, seq, ...] but those that masks read, which stay whole.

        Targets must have been shifted before: the token after a chunk's last one is another rank's.

        Raises:
            SettingError: the sequence does not divide by twice the ranks.
        """
        rows, length = batch["input_ids"].shape
        require_divisible(length, self.group.size, "A batch's sequence")
        indices = self.indices(length, batch["input_ids"].device)
        return {
            name: tensor if name in READ_WHOLE or tensor.shape[:2] != (rows, length) else tensor.index_select(1, indices)
            for name, tensor in batch.items()
        }

    def of_share(self, objective: Objective) -> Objective:
        """The objective of a share: the same sums, over the tokens at this rank's positions."""

        def objective_of_share(model: nn.Module, batch: Batch) -> Totals:
            with self.of(batch["input_ids"].shape[1]):
                return objective(model, self.cut(batch))

        return objective_of_share
