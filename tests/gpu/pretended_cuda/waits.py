"""Counts where the host waits for the card: each copy from it, each copy to it from memory that is not pinned, and each operator whose
result has a size that only the card knows."""

import threading
import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read their numbers on the host: their result's size, or the result itself.
READ_ON_HOST = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
OURS = ("/shared/", "/solutions/")


class Waits(TorchDispatchMode):
    """Counts within `with`, on the thread that enters it. places: (what, file:line of ours) -> how often."""

    counting: "Waits | None" = None  # what torch.cuda.synchronize and torch.tensor count for, which no operator shows

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self.thread = threading.get_ident()

    def __enter__(self) -> "Waits":
        Waits.counting = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Waits.counting = None
        super().__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if what := wait_of(operator._schema.name.split("::")[-1], args, kwargs):
            self.places[what, place()] += 1
        return operator(*args, **kwargs)


def wait_of(name: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why the host waits in this call of an operator, or None."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in ("copy_", "_to_copy", "_copy_from"):
        source = args[1] if name == "copy_" else args[0]
        to = args[0].device.type if name == "copy_" else torch.device(kwargs.get("device") or source.device).type
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if (source.device.type, to) == ("cuda", "cpu"):
            return None if asynchronous else "copy to the host"
        if (source.device.type, to) == ("cpu", "cuda"):
            return None if asynchronous and source.is_pinned() else "copy from memory that is not pinned"
        return None
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    if name in READ_ON_HOST:
        return name
    if name.startswith(("index", "_index_put", "_unsafe_index")):
        indices = [tensor for tensor in tensors[1:] if tensor.dim()]
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices):
            return "boolean index"
        return "index on the host" if any(tensor.is_cpu for tensor in indices) else None
    return None


def place() -> str:
    """The innermost line of ours on the stack, as folder/file.py:line."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        for folder in OURS:
            if folder in frame.filename:
                return f"{folder.strip('/')}/{frame.filename.split(folder)[-1]}:{frame.lineno}"
    return "elsewhere"


def count_hidden() -> None:
    """Count `torch.cuda.synchronize`, and `torch.tensor(..., device="cuda")`, which hides its copy from dispatch modes."""
    make = torch.tensor

    def note(what: str) -> None:
        if Waits.counting is not None and Waits.counting.thread == threading.get_ident():  # other ranks are threads too
            Waits.counting.places[what, place()] += 1

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if made.is_cuda:
            note("copy from memory that is not pinned")
        return made

    torch.tensor = tensor
    torch.cuda.synchronize = lambda device=None: note("synchronize")
