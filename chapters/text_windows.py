"""A dataset of text windows for chapter 03's loader, so that a run on plain bytes resumes exactly.

Chapter 01's `random_batches` draws from one generator, whose position is not in any checkpoint. Here the n-th window is a
function of the seed and of n.

Left out on purpose: documents, packing and tokenizers. `shared.data.rows` has them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.batches import batch_at, require_window
from shared.data.rows import Position, Row


class TextWindows:
    """Windows of seq + 1 bytes from random places, without an end.

    Args:
        stream: [tokens] of any integer dtype.
        seq: tokens in a window's input.
        seed: of the places.

    Raises:
        ValueError: the stream is shorter than one window.
    """

    def __init__(self, stream: Tensor, seq: int, seed: int = 0):
        require_window(stream, seq)
        self.stream, self.seq, self.seed = stream, seq, seed

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share, or its windows would be others."""
        return {"seq": self.seq, "seed": self.seed, "tokens": len(self.stream)}

    def initial_state(self) -> Position:
        return {"window": 0}

    def next_indices(self, position: Position, count: int) -> tuple[list[int], Position]:
        """The numbers of the next `count` windows, and the position after them."""
        first = position["window"]
        return list(range(first, first + count)), {"window": first + count}

    def row(self, index: int) -> Row:
        """Window `index`: `input_ids` and `targets`, [seq] int64 each."""
        start = np.random.default_rng((self.seed, index)).integers(len(self.stream) - self.seq)
        batch = batch_at(self.stream, torch.tensor([int(start)]), self.seq)
        return Row({name: tensor[0] for name, tensor in batch.items()}, 0)
