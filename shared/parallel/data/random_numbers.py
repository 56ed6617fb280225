"""Chapter 06. Random state for activation checkpointing: dropout must draw the same numbers when a block is run again.

Only torch's generators are saved, for every block of every step; a run's checkpoint (chapter 04) saves all generators.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state_of(tensor: Tensor) -> list[Tensor]:
    """The states of torch's generators that a computation with `tensor` may draw from: the CPU's, and its GPU's."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(tensor.device)] if tensor.is_cuda else [])


@contextmanager
def random_numbers_from(state: list[Tensor]) -> Iterator[None]:
    """Restore a random state (as torch.random.fork_rng): within the block numbers are drawn from `state`; afterwards generators are reset.

    The GPU whose state it holds is the current one, as it is in a forward and in a backward pass.
    """
    cpu, *gpu = state
    with torch.random.fork_rng([torch.cuda.current_device()] if gpu else []):
        torch.set_rng_state(cpu)
        for of_device in gpu:
            torch.cuda.set_rng_state(of_device)
        yield
