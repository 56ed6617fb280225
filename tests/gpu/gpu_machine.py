"""The one place where slices meet the device: clocks, memory, host waits, kernels. On a CPU the same calls run, and measure less.

Slices call these and nothing of `torch.cuda`, so that their start on a CPU runs as much of them as it can.
"""

import gc
import platform
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 2**30
CONTEXT = 0.5 * GIB  # of a card's memory the driver, the CUDA context and the libraries take, and the allocator does not see
ATTENTION = "aten::_scaled_dot_product_"


class Machine:
    """The device under test.

    Args:
        name: cuda, or cpu for the start without a GPU.

    Attributes:
        device: with its index. is_gpu: whether it is the GPU that the slices are about.
    """

    def __init__(self, name: str):
        self.is_gpu = name == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.is_gpu else torch.device("cpu")

    def describe(self) -> dict[str, Any]:
        """What a result belongs to: the device, its driver's version of CUDA, PyTorch, Python."""
        about = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.processor() or platform.machine()}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            about |= {
                "device": properties.name, "gpus": torch.cuda.device_count(), "memory GiB": round(properties.total_memory / GIB, 1),
                "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
            }  # fmt: skip
        return about

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Collect what is no longer used, and give the allocator's cache back, between two configurations."""
        if self.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def seconds(self, function: Callable[[], Any], repeats: int, warmup: int = 2) -> float:
        """The median seconds of a call: by CUDA events around it, which count the device's time, or by the clock."""
        for _ in range(warmup):
            function()
        return statistics.median(self.one_call(function) for _ in range(repeats))

    def one_call(self, function: Callable[[], Any]) -> float:
        if not self.is_gpu:
            began = time.perf_counter()
            function()
            return time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def wall_seconds(self, function: Callable[[], Any]) -> float:
        """The seconds of one call until the device has finished, the host's work included."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

    def peak_gib(self, function: Callable[[], Any]) -> tuple[float | None, float | None]:
        """Run a function; the peak of allocated and of reserved memory in GiB, with what was allocated before; None, None on a CPU."""
        if not self.is_gpu:
            function()
            return None, None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / GIB, torch.cuda.max_memory_reserved(self.device) / GIB

    @contextmanager
    def as_card_of(self, gib: float):
        """Within the block the process may allocate as much as on a card of this memory; yields whether that is so: not on a CPU, nor on
        a smaller card."""
        total = torch.cuda.get_device_properties(self.device).total_memory if self.is_gpu else 0
        limited = total >= gib * GIB
        if limited:
            torch.cuda.set_per_process_memory_fraction((gib * GIB - CONTEXT) / total, self.device)
        try:
            yield limited
        finally:
            if limited:
                torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def host_waits(self) -> "HostWaits":
        """`with machine.host_waits() as waits:` counts in `waits.places` where the host waits for the device."""
        return HostWaits(self)

    def attention_kernels(self, function: Callable[[], Any]) -> str:
        """Which of PyTorch's attention kernels ran, by the operators that were dispatched: flash, efficient, cudnn, flash_for_cpu; math
        where it was none of them, because that one is written out in other operators."""
        with DispatchedOperators() as seen:
            function()
        kernels = {name.removeprefix(ATTENTION).removesuffix("_attention") for name in seen.names if "backward" not in name}
        return " and ".join(sorted(kernels)).replace("flash_attention_for_cpu", "flash_for_cpu") or "math"


class HostWaits:
    """Counts the host's waits within `with`, by PyTorch's `set_sync_debug_mode`.

    It sees copies to the host, `item` and `nonzero`; it does not see `torch.cuda.synchronize`, which says what it does.

    Attributes:
        places: `file:line` -> how often; None on a CPU, where nobody waits.
    """

    def __init__(self, machine: Machine):
        self.machine, self.places = machine, Counter() if machine.is_gpu else None

    def __enter__(self) -> "HostWaits":
        if self.machine.is_gpu:
            self.machine.synchronize()
            self.catching = warnings.catch_warnings(record=True)
            self.said = self.catching.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        if self.machine.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.catching.__exit__(*error)
            waits = [each for each in self.said if "called a synchronizing" in str(each.message)]
            self.places.update(f"{each.filename.rsplit('/', 1)[-1]}:{each.lineno}" for each in waits)


class DispatchedOperators(TorchDispatchMode):
    """Notes the names of the attention operators that PyTorch dispatches within `with`."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name
        if name.startswith(ATTENTION):
            self.names.add(name)
        return function(*arguments, **(options or {}))


@contextmanager
def tf32(allowed: bool):
    """Matrix products of float32 in TF32 (10 bits of mantissa) within the block, or in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic():
    """Only algorithms that give the same bits each time, within the block; an operation that has none raises. `CUBLAS_WORKSPACE_CONFIG`
    must be set before CUDA starts: a slice's `ENVIRONMENT` does."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
