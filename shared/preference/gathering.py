"""Chapter 11. How a rollout gathers weights that are fully sharded: all at once, or block by block for each token; chosen by free memory.

    once     a unit stays gathered until the rollout ends           a rank holds the whole weights beside its shards
    block    a unit is gathered, computes and is freed each time    a rank holds its shards and a few units; everything travels per token

Only storage differs, so tokens and log-probabilities are the same to the last bit, and each rollout chooses for itself. All ranks choose
the same way: a unit that one rank gathers is gathered by all.

Left out on purpose: keeping as many gathered units as fit.
"""

import platform
from typing import Literal, NamedTuple

import psutil
import torch

from shared.parallel.strategy import ParallelStrategy

Gather = Literal["auto", "once", "block"]
ROOM = 0.9  # of the free memory; the rest is for activations of a pass without gradients, and for what the allocator keeps in reserve


class Need(NamedTuple):
    """Bytes that a rank needs for unsharded weights and its cache, and its free bytes."""

    rank: int
    needed: float
    free: float


def fits_whole(needed: float, free: float) -> bool:
    """Whether whole weights and the cache, `needed` bytes, fit into `free` bytes."""
    return needed <= ROOM * free


def gathers_once(strategy: ParallelStrategy, asked: Gather, cache: float = 0.0) -> tuple[bool, str]:
    """Whether to gather all weights once, the same on all ranks, which all call it; and a line that says why, if memory decided.

    Args:
        asked: auto lets memory decide.
        cache: bytes that a rank's sampler holds besides, at most.
    """
    if asked != "auto" or strategy.mesh.fsdp.size == 1:
        return asked != "block", ""
    device = next(strategy.module.parameters()).device
    mine = [platform.node() if device.type == "cpu" else None, strategy.whole_bytes + cache, free_memory(device)]
    everyone = strategy.mesh.world.gather_objects(mine)
    hosts = [host for host, *_ in everyone]
    needs = [Need(rank, needed, free / (hosts.count(host) if host else 1)) for rank, (host, needed, free) in enumerate(everyone)]
    tightest = max(needs, key=lambda each: each.needed / max(each.free, 1))
    once = fits_whole(tightest.needed, tightest.free)
    how = "gather all weights once" if once else "gather weights block by block"
    figures = f"{gibibytes(tightest.needed)}, and rank {tightest.rank} has {gibibytes(tightest.free)} free"
    return once, f"Rollouts {how}: whole weights and the cache take {figures}."


def free_memory(device: torch.device) -> float:
    """Free memory of a device, in bytes. For a CPU it is the host's, which all ranks on that host share."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return psutil.virtual_memory().available


def gibibytes(count: float) -> str:
    """Bytes as a text in GiB, to three digits.

    >>> gibibytes(3 * 2**30)
    '3 GiB'
    """
    return f"{count / 2**30:.3g} GiB"
