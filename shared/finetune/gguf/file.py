"""Chapter 10. Reader of a GGUF file: metadata as Python values, and tensors of every type as float32, one at a time.

The library that llama.cpp's authors ship, `gguf`, parses the file and knows the quantized types.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.course.importing import require
from shared.model.hf.files import PretrainedError


def library() -> ModuleType:
    """The package `gguf`."""
    return require("gguf", "pretrained", "GGUF")


class GgufFile:
    """A GGUF file, memory-mapped.

    Attributes:
        metadata: key -> number, text, or list.
        shapes: tensor -> its shape, as PyTorch counts dimensions; GGUF lists them from the innermost.
        bytes: tensor -> bytes in the file.
        architecture: llama.cpp's name of the model's kind, as `llama` or `qwen3moe`.

    Raises:
        PretrainedError: the file is no GGUF, damaged, or one part of several.
        CourseError: the library is missing.
    """

    def __init__(self, path: Path):
        reader_of = library().GGUFReader
        try:
            reader = reader_of(path)
            self.metadata: dict[str, Any] = {name: plain(field.contents()) for name, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # the library raises whatever a damaged length leads to
            raise PretrainedError(f"{path} cannot be read as GGUF ({error}): copy it again.") from None
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise PretrainedError(f"{path} is one of {parts} parts of a model: join them with `llama-gguf-split --merge` first.")
        self.path = path
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self.tensors.items()}
        self.bytes = {name: int(tensor.n_bytes) for name, tensor in self.tensors.items()}
        self.architecture = self.metadata.get("general.architecture")

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value that the file has for its architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor in float32. index: of its first dimension, for one of several stacked matrices."""
        tensor = self.tensors[name]
        data, shape = (tensor.data, self.shapes[name]) if index is None else (tensor.data[index], self.shapes[name][1:])
        try:
            numbers = library().dequantize(np.asarray(data), tensor.tensor_type)
        except NotImplementedError:
            raise PretrainedError(f"{name} in {self.path} is of type {tensor.tensor_type.name}, which gguf cannot read.") from None
        return torch.from_numpy(np.array(numbers, dtype=np.float32).reshape(shape))


def plain(value: Any) -> Any:
    """A float of four bytes as the shortest decimal that means it: 1e-05, and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
