"""Chapter 02. Writer of safetensors files: all tensors at once, or one after the other as they are made.

    8 bytes: the header's length    header: JSON, name -> dtype, shape, first and last byte    the numbers, tensor after tensor

The library wants all tensors of a file in memory, and writes a temporary file that only its owner may read, which it renames: weights would
be 0600 in a folder of 0644. Here files have the permissions that the umask says, so that others of a group can read an export.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DTYPES = {  # as torch and NumPy call them, and as a header does
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int8": "I8",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors under their names, with the mode of any file that is created here.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    path.touch()  # asks the umask without setting it, which would be the whole process's, other threads' too
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def stream_tensors(path: Path, like: Mapping[str, Tensor], make: Callable[[str], Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with one tensor in memory at a time, byte for byte as the library does.

    Args:
        path: the file.
        like: name -> a tensor of the same shape and dtype, perhaps on the meta device.
        make: makes the tensor of a name, on the CPU; called once for each, in the order of `ordered`.
        metadata: what the header says of the whole file.
    """
    with path.open("wb") as file:
        file.write(header_of(like, metadata))
        for name in ordered(like):
            file.write(make(name).contiguous().view(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())  # some file systems say only now that there is no room


def header_of(like: Mapping[str, Any], metadata: dict[str, str] | None) -> bytes:
    """The header of a safetensors file, with its length. like: name -> a tensor, or a NumPy array, of the same shape and dtype."""
    header, place = {"__metadata__": metadata} if metadata else {}, 0
    for name in ordered(like):
        stop = place + like[name].nbytes
        dtype = DTYPES[str(like[name].dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(like[name].shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that numbers start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def ordered(like: Mapping[str, Any]) -> list[str]:
    """The order of tensors in a file: wide numbers first, so that each is aligned, then by name."""
    return sorted(like, key=lambda name: (-like[name].dtype.itemsize, name))
