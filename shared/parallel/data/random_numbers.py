"""Chapter 06. The same random numbers a second time: what dropout drew when a block was run, it must draw when the block is run again.

Chapter 04 saves every generator of a run, once in many steps. Here it is torch's alone, for every block of every step.
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
    """Within, random numbers are drawn from `state` on; afterwards, the generators are as they were before.

    The GPU whose state it holds is the current one, as it is in a forward and in a backward pass.
    """
    cpu, *gpu = state
    with torch.random.fork_rng([torch.cuda.current_device()] if gpu else []):
        torch.set_rng_state(cpu)
        for of_device in gpu:
            torch.cuda.set_rng_state(of_device)
        yield
