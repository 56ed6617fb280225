"""Chapter 02. Hugging Face format of a model family: how its `config.json` and the names and layouts of its tensors are read and written.

A table of `Key`s says once, for reading and writing, what `config.json` calls each field of a configuration. A `FileTensor` says once how
one tensor in a file relates to parameters of ours: it is the same, transposed, several of them in one, or a slice of one. GPT-2's linear
layers are stored [in, out], the other way round from everyone else's, and its queries, keys and values are one matrix. BLOOM fuses them
head by head. Mixtral stores each expert by itself, where ours may be stacked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from shared.model.config import ModelConfig

ConfigJson = dict[str, Any]  # the content of a config.json
REQUIRED = object()
STACK = ".experts.gate_up_proj"  # ending of a tensor [E, 2 intermediate, hidden] that only files with stacked experts hold

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


class Key(NamedTuple):
    """A key of `config.json`. default: its value where the file does not have it."""

    name: str
    default: Any = REQUIRED


def read_keys(keys: Mapping[str, Key], raw: ConfigJson, owner: type = ModelConfig) -> dict[str, Any]:
    """The fields of a configuration that a `config.json` gives.

    Args:
        keys: by the field.
        owner: whose fields these are.

    Raises:
        KeyError: a required key is missing.
        ValueError: the activation is not one of this model's, or a number is none.
    """
    fields = {field: raw[name] if default is REQUIRED else raw.get(name, default) for field, (name, default) in keys.items()}
    for field, hint in get_type_hints(owner).items():
        kinds = {*(get_args(hint) or (hint,))} - {NoneType}
        if field in fields and fields[field] is not None and kinds in ({int}, {float}):
            require_number(*kinds, keys[field].name, fields[field])
    return fields | ({"hidden_act": activation(fields["hidden_act"])} if "hidden_act" in fields else {})


def require_number(kind: type, name: str, value: Any) -> None:
    """Refuse what is no whole number, for the kind `int`, or no number, for `float`; true is neither."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{name} is {value!r}: give a {'whole ' if kind is int else ''}number.")


def write_keys(keys: Mapping[str, Key], config: ModelConfig, tanh: str = "gelu_new") -> ConfigJson:
    """The same keys with the values of a configuration. tanh: what the format calls GELU by its tanh approximation."""
    raw = {name: getattr(config, field) for field, (name, _) in keys.items()}
    return {name: tanh if value == "gelu_tanh" else value for name, value in raw.items()}


def as_named(*fields: str) -> dict[str, Key]:
    """Required keys that are called as the fields are."""
    return {field: Key(field) for field in fields}


Range = tuple[int, int]  # start and stop
Place = tuple[list[Range], Callable[[Tensor], Tensor]]  # what to read of each dimension, and what makes our numbers of that


def only(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def as_it_is(ranges: list[Range], index: int, shape: Sequence[int]) -> Place:
    return ranges, lambda tensor: tensor


@dataclass(frozen=True)
class FileTensor:
    """One tensor in a file.

    name: in the file. ours: logical names of the parameters that it holds.
    pack: makes the file's tensor from theirs, in that order.
    locate: the other way, for a slice: locate(ranges, index, shape) says where numbers `ranges` (in each dimension) of parameter
        `ours[index]`, which is of `shape` as a whole, stand in the file's tensor.
    part: None for whole parameters; else the tensor is entry `part` of each along its first dimension, such as one expert of a stack
        [E, out, in], and other tensors hold the other entries.
    """

    name: str
    ours: tuple[str, ...]
    pack: Callable[[list[Tensor]], Tensor] = only
    locate: Callable[[list[Range], int, Sequence[int]], Place] = as_it_is
    part: int | None = None

    def views(self, parameters: dict[str, Tensor]) -> list[Tensor]:
        """What the tensor holds of our parameters, each a view into one."""
        return [parameters[name] if self.part is None else parameters[name][self.part] for name in self.ours]


@dataclass(frozen=True)
class Format:
    """One `model_type` of Hugging Face.

    model_type, architecture: as `config.json` says them.
    read: the configuration that a config.json describes.
    write: what a config.json says of a configuration, without the two names above.
    tensors: the tensors of a model with this (resolved) configuration.
    stacked: the same of a file that keeps a layer's experts in stacks, as transformers 5 does in memory; None for models without experts.
    tied: names under which a file may repeat a tied head.
    tied_by_file: whether the head is tied is said by the file, which then lacks those names, and not by config.json.
    required: keys that change the computation, with the only values that are understood here.
    ignored: patterns of tensors that old files hold and that no model reads: buffers, heads of other tasks.
    prefix: what files of the bare model leave out in front of names.
    renamed: endings of old files -> today's.
    token_ids: what transformers takes for `eos_token_id` and the other special tokens where a config.json does not say; None for any other.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigJson], ModelConfig]
    write: Callable[[ModelConfig], ConfigJson]
    tensors: Callable[[ModelConfig], list[FileTensor]]
    stacked: Callable[[ModelConfig], list[FileTensor]] | None = None
    tied: tuple[str, ...] = ()
    tied_by_file: bool = False
    required: dict[str, tuple] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    token_ids: dict[str, int] = field(default_factory=dict)

    def tensors_of(self, config: ModelConfig, names: Iterable[str]) -> dict[str, FileTensor]:
        """The tensors that files should hold, by name. names: what they hold, which says how experts are kept."""
        make = self.stacked if self.stacked and any(name.endswith(STACK) for name in names) else self.tensors
        return {entry.name: entry for entry in make(config)}


def not_in_format(stored: Iterable[FileTensor], like: Mapping[str, Tensor]) -> list[str]:
    """Parameters, buffers and entries of stacks that no tensor of a format holds. like: everything that the model has, by logical name."""
    parts: dict[str, set[int | None]] = {}
    for entry in stored:
        for name in entry.ours:
            parts.setdefault(name, set()).add(entry.part)
    found = [name for name in like if name not in parts]
    for name, held in parts.items():
        if name in like and None not in held:
            found += [f"{name}[{number}]" for number in range(len(like[name])) if number not in held]
    return found


def activation(name: str) -> str:
    """Our name of an activation."""
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"The activation {name!r} is not one of this model's: {', '.join(ACTIVATION_NAMES)}.")
    return ACTIVATION_NAMES[name]


def same(name: str, ours: str) -> FileTensor:
    return FileTensor(name, (ours,))


def transposed(name: str, ours: str) -> FileTensor:
    """[in, out] in the file."""
    return FileTensor(name, (ours,), lambda tensors: tensors[0].t(), lambda ranges, index, shape: (ranges[::-1], torch.t))


def concatenated(name: str, ours: tuple[str, ...]) -> FileTensor:
    """Biases of equal length one after another."""
    return FileTensor(name, ours, torch.cat, lambda ranges, index, shape: (moved(ranges, index * shape[0]), lambda x: x))


def concatenated_transposed(name: str, ours: tuple[str, ...]) -> FileTensor:
    """Matrices of equal size, [in, out] each, next to each other along the outputs."""
    return FileTensor(
        name, ours, lambda tensors: torch.cat(tensors).t(), lambda ranges, index, shape: (moved(ranges, index * shape[0])[::-1], torch.t)
    )


def concatenated_experts(name: str, ours: tuple[str, ...]) -> FileTensor:
    """Stacks [E, out, in] of equal size next to each other along the outputs."""
    return FileTensor(
        name, ours, partial(torch.cat, dim=1),
        lambda ranges, index, shape: ([ranges[0], *moved(ranges[1:], index * shape[1])], lambda x: x),
    )  # fmt: skip


def moved(ranges: list[Range], by: int) -> list[Range]:
    """The ranges with the first dimension's moved."""
    (start, stop), *rest = ranges
    return [(start + by, stop + by), *rest]


def interleaved_heads(name: str, ours: tuple[str, ...], heads: int) -> FileTensor:
    """The first head's rows of each parameter, then the second head's, and so on."""
    return FileTensor(name, ours, partial(join_heads, heads=heads), partial(place_in_heads, heads=heads, parts=len(ours)))


def join_heads(tensors: list[Tensor], heads: int) -> Tensor:
    return torch.stack([tensor.unflatten(0, (heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)


def place_in_heads(ranges: list[Range], index: int, shape: Sequence[int], heads: int, parts: int) -> Place:
    """All that the file has of the heads in question, of which our rows are then taken."""
    (start, stop), *rest = ranges
    rows = shape[0] // heads
    first, last = start // rows, -(-stop // rows)

    def take(tensor: Tensor) -> Tensor:
        of_heads = tensor.unflatten(0, (last - first, parts, rows))[:, index].flatten(0, 1)
        return of_heads[start - first * rows : stop - first * rows]

    return [(first * parts * rows, last * parts * rows), *rest], take


def weight_and_bias(make: Callable[[str, str], FileTensor], name: str, ours: str, bias: bool) -> list[FileTensor]:
    """A layer's weight by `make`, and its bias as it is, where it has one."""
    return [make(f"{name}.weight", f"{ours}.weight")] + ([same(f"{name}.bias", f"{ours}.bias")] if bias else [])
