"""Chapter 01. The device that a run computes on (CPU, CUDA or MPS), and its memory: what one step frees is kept for the next.

A step allocates hundreds of megabytes and frees them all. By default the C library hands large blocks back to the operating
system at once, and the next step pays for fetching and clearing the same pages again, one page fault for every 4 KiB.
GPUs do not have the problem: PyTorch caches their memory itself.
"""

import ctypes
import sys

import torch
from torch import Tensor

from shared.course.errors import CourseError
from shared.totals import Batch

READ_ON_HOST = ("targets", "documents")  # entries of a batch that decide the sizes of other tensors
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


def pick_device(asked: str) -> torch.device:
    """The device of this name, or for "auto" a GPU where there is one.

    Raises:
        CourseError: PyTorch finds no such device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked != "auto":
        if not there[asked]:
            raise CourseError(f"PyTorch finds no {asked.upper()} device here: choose auto or cpu as device.")
        return torch.device(asked)
    return torch.device(next(name for name in ("cuda", "mps", "cpu") if there[name]))


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory in this process, until it ends. Numbers stay the same.

    Returns:
        Whether it listened: glibc on Linux does; elsewhere nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never_trim = mallopt(M_TRIM_THRESHOLD, -1)
    never_map = mallopt(M_MMAP_MAX, 0)  # a mapped block would be handed back when it is freed, however large
    return bool(never_trim and never_map)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device, each entry as by `sent`. On a GPU those that the host reads stay beside it as they were; see `on_host`."""
    kept = {f"{name}_on_host": batch[name] for name in READ_ON_HOST if name in batch and device.type != "cpu"}
    return {name: sent(tensor, device) for name, tensor in batch.items()} | kept


def on_host(batch: Batch, name: str) -> Tensor:
    """An entry of a batch on the CPU, where `on_device` left it: to read it on a GPU, the host would have to wait for all work before."""
    return batch.get(f"{name}_on_host", batch[name])


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. To a GPU it travels through pinned memory, so that the host need not wait: its copy may still be under way on
    return, and the GPU's later work comes after it."""
    return (tensor.pin_memory() if device.type == "cuda" and tensor.is_cpu else tensor).to(device, non_blocking=True)
