"""Chapter 02. What a format is: how a family's `config.json` and tensor names are read and written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.model.config import ModelConfig
from shared.model.hf.stored import Stored

Told = dict[str, Any]  # the content of a config.json

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One `model_type` of Hugging Face.

    model_type, architecture: as `config.json` says them.
    read: the configuration that a config.json describes.
    write: what a config.json says of a configuration, without the two names above.
    tensors: the tensors of a model with this (resolved) configuration.
    tied: names under which a file may repeat a tied head.
    tied_by_file: whether the head is tied is said by the file, which then lacks those names, and not by config.json.
    required: keys that change the computation, with the only values that are understood here.
    ignored: patterns of tensors that old files hold and that no model reads: buffers, heads of other tasks.
    prefix: what files of the bare model leave out in front of names.
    renamed: endings of old files -> today's.
    """

    model_type: str
    architecture: str
    read: Callable[[Told], ModelConfig]
    write: Callable[[ModelConfig], Told]
    tensors: Callable[[ModelConfig], list[Stored]]
    tied: tuple[str, ...] = ()
    tied_by_file: bool = False
    required: dict[str, tuple] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    renamed: dict[str, str] = field(default_factory=dict)


def activation(name: str) -> str:
    """Our name of an activation.

    Raises:
        ValueError: one that this model does not have.
    """
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"The activation {name!r} is not one of this model's: {', '.join(ACTIVATION_NAMES)}.")
    return ACTIVATION_NAMES[name]
