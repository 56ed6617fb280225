"""The most bytes of tensors that a thread has held at once, each storage once, as operations see them; and what the allocator says."""

import gc
import json

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """Counts the storages of all tensors that operations within `with` take or return, as long as they live and as large as they are.

    now, peak: bytes.
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for key, reference in self.seen.items()}
        self.seen = {key: self.seen[key] for key, storage in storages.items() if storage is not None}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now)
        return result


def allocated_in_forward(model, objective, data, path) -> int:
    """Bytes that the CPU's allocator has given out during a forward pass and not taken back: another way of measuring."""
    objective(model, data).loss_sum.backward()
    gc.collect()  # what other tests left in circles would be taken back some time in between
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            totals = objective(model, data)
            with record_function("forward is over"):
                pass
            totals.loss_sum.backward()
    finally:
        gc.enable()
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (end,) = (event["ts"] for event in events if event.get("name") == "forward is over")
    return sum(event["args"]["Bytes"] for event in events if event.get("name") == "[memory]" and event["ts"] < end)
