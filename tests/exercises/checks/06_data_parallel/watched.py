"""What the checks of FSDP's exercises share: ranks as threads, each with a unit's tensors, and an eye on what is handed over."""

import torch
from torch import Tensor

from shared.course.comparing import Said
from shared.parallel.comm.threads import run_threads

CONTRACT = "the contract"


def over_ranks(work, ranks: int) -> dict:
    """`work(world)` on each rank, by rank."""
    return {f"rank {rank}": result for rank, result in enumerate(run_threads(work, ranks))}


def let_go(numbers: int, dtype: torch.dtype) -> Tensor:
    """[numbers], whose storage has 0 bytes."""
    tensor = torch.zeros(numbers, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def shown(view: Tensor) -> Tensor | Said:
    """A view's numbers, unless its storage lacks them: who reads such a view ends the process."""
    needed = (view.storage_offset() + view.numel()) * view.element_size()
    held = view.untyped_storage().nbytes()
    if held >= needed:
        return view.clone()
    return Said(f"{'too little' if held else 'no'} memory ({held} bytes, {needed} are needed)")


def overlaps(part: Tensor, whole: Tensor, rank: int) -> bool:
    """Whether a part lies within the whole at another place than its rank's own, where it is overwritten while it is read."""
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    return part.storage_offset() - whole.storage_offset() != rank * part.numel()


def finished(work) -> dict:
    """Wait for an operation under way; `problem` where it is none."""
    if not hasattr(work, "wait"):
        return {f"returned {type(work).__name__} where an operation under way was asked for": True}
    work.wait()
    return {}


def begun(world, operation: str) -> dict:
    """What the trace tells: how often which operation, with how many bytes, and whether one was waited for already."""
    entries = world.trace.entries
    return {
        "operations": [entry.operation for entry in entries],
        "bytes": [entry.bytes for entry in entries if entry.operation == operation],
        "waited for before it was returned": any(entry.end is not None for entry in entries),
    }
