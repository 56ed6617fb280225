"""A pretended CUDA for CPU builds of PyTorch: real numbers, CUDA's device checks, counted memory; two cards that say they are RTX 3090s.

    from pretended_cuda import backend     # BEFORE torch is imported: PyTorch asks once for its CUDA hooks
    backend.start()
    torch.ones(2, device="cuda") + torch.ones(2)      # RuntimeError, as on a GPU

`backend.cpp` is compiled once for each build of PyTorch (15 s of processor time) and kept below `.pytest_cache`. Here are its loading and
the Python half of `torch.cuda`, which on a CPU build says that CUDA is not compiled in.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("backend.cpp")
KEPT = Path(__file__).resolve().parents[3] / ".pytest_cache" / "pretended_cuda"
TRIED = ("2.13.0",)  # versions of PyTorch on which it was seen to work; its C++ interfaces change
CARDS = 2
PROPERTIES = {
    "name": "NVIDIA GeForce RTX 3090",
    "major": 8,
    "minor": 6,
    "total_memory": 25_438_126_080,
    "multi_processor_count": 82,
    "warp_size": 32,
}


def reason_against() -> str | None:
    """Why it cannot be used here, or None. Imports nothing."""
    version, _, build = importlib.metadata.version("torch").partition("+")
    if version not in TRIED or build != "cpu":
        return f"the pretended CUDA was tried with the CPU builds of torch {', '.join(TRIED)}, and this is {version}+{build or 'CUDA'}"
    if shutil.which("g++") is None:
        return "the pretended CUDA needs the compiler g++"
    return None if sys.platform == "linux" else "the pretended CUDA is built for Linux"


def build() -> Path:
    """The compiled library, made where it is missing."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode() + str(torch_folder).encode())
    library = KEPT / f"{digest.hexdigest()[:16]}.so"
    if not library.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        includes = [flag for folder in ("include", "include/torch/csrc/api/include") for flag in ("-I", torch_folder / folder)]
        libraries = ["-L", torch_folder / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        subprocess.run(["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *includes, SOURCE, "-o", made, *libraries], check=True)
        made.replace(library)
    return library


class Card:
    """`torch.cuda.get_device_properties` of either card."""

    def __init__(self) -> None:
        self.__dict__.update(PROPERTIES)


def start() -> ctypes.CDLL:
    """Load the backend and give `torch.cuda` its answers.

    Returns:
        The library; its `pretended_cuda_live` and `pretended_cuda_peak` are bytes of both cards together.

    Raises:
        RuntimeError: torch was imported before.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: start the pretended CUDA first.")
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    for name in ("live", "peak", "device"):
        getattr(library, f"pretended_cuda_{name}").restype = ctypes.c_int64
    library.pretended_cuda_set_device.argtypes = [ctypes.c_int64]
    library.pretended_cuda_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    import torch

    library.pretended_cuda_start()
    for name, function in answers(library).items():
        setattr(torch.cuda, name, function)
    for name, function in internal_answers(library).items():
        setattr(torch._C, name, function)
    for name in ("memory_allocated", "max_memory_allocated"):
        setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        library.pretended_cuda_resize(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize_storage
    return library


def answers(library: ctypes.CDLL) -> dict[str, Any]:
    """Functions of `torch.cuda`."""
    import torch

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        library.pretended_cuda_set_device(index or 0)

    def live(*_: Any) -> int:
        return library.pretended_cuda_live()

    def peak(*_: Any) -> int:
        return library.pretended_cuda_peak()

    def exchange(index: int) -> int:
        before = library.pretended_cuda_device()
        if index >= 0:
            library.pretended_cuda_set_device(index)
        return before

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: CARDS,
        "current_device": lambda: library.pretended_cuda_device(),
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_name": lambda *_: PROPERTIES["name"],
        "get_device_properties": lambda *_: Card(),
        "get_device_capability": lambda *_: (PROPERTIES["major"], PROPERTIES["minor"]),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "memory_allocated": live,
        "memory_reserved": live,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda *_: library.pretended_cuda_reset_peak(),
        "mem_get_info": lambda *_: (PROPERTIES["total_memory"] - live(), PROPERTIES["total_memory"]),
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * CARDS,
        "set_rng_state": lambda state, *_: None,
        "set_rng_state_all": lambda states: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "utilization": lambda *_: 50,
        "is_current_stream_capturing": lambda: False,
    }


def internal_answers(library: ctypes.CDLL) -> dict[str, Any]:
    """Functions of `torch._C`, which a CPU build lacks."""
    import torch

    return {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDevice": lambda: library.pretended_cuda_device(),
        "_cuda_setDevice": lambda index: library.pretended_cuda_set_device(index),
        "_cuda_getDeviceCount": lambda: CARDS,
        "_cuda_exchangeDevice": torch.cuda._exchange_device,
        "_cuda_maybeExchangeDevice": torch.cuda._maybe_exchange_device,
        "_cuda_getCurrentRawStream": lambda *_: 0,
        "_cuda_getCompiledVersion": lambda: 13000,
    }
