"""Chapter 02. How one tensor of a file relates to parameters of ours: the same, transposed, or several in one.

GPT-2's linear layers are stored [in, out], the other way round from everyone else's, and its queries, keys and values are one
matrix. BLOOM fuses them too, but head by head. A `Stored` says so once, for reading and for writing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


def alone(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def as_it_is(tensor: Tensor) -> list[Tensor]:
    return [tensor]


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    name: in the file. ours: logical names of the parameters that it holds.
    pack: makes the file's tensor from theirs, in that order. unpack: the other way.
    """

    name: str
    ours: tuple[str, ...]
    pack: Callable[[list[Tensor]], Tensor] = alone
    unpack: Callable[[Tensor], list[Tensor]] = as_it_is


def same(name: str, ours: str) -> Stored:
    return Stored(name, (ours,))


def transposed(name: str, ours: str) -> Stored:
    """[in, out] in the file."""
    return Stored(name, (ours,), lambda tensors: tensors[0].t(), lambda tensor: [tensor.t()])


def side_by_side(name: str, ours: tuple[str, ...]) -> Stored:
    """Biases of equal length one after another."""
    return Stored(name, ours, torch.cat, lambda tensor: list(tensor.chunk(len(ours))))


def side_by_side_transposed(name: str, ours: tuple[str, ...]) -> Stored:
    """Matrices of equal size, [in, out] each, next to each other along the outputs."""
    return Stored(name, ours, lambda tensors: torch.cat(tensors).t(), lambda tensor: [part.t() for part in tensor.chunk(len(ours), dim=1)])


def head_by_head(name: str, ours: tuple[str, ...], heads: int) -> Stored:
    """The first head's rows of each parameter, then the second head's, and so on."""
    return Stored(name, ours, partial(weave, heads=heads), partial(unweave, heads=heads, parts=len(ours)))


def weave(tensors: list[Tensor], heads: int) -> Tensor:
    return torch.stack([tensor.unflatten(0, (heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)


def unweave(tensor: Tensor, heads: int, parts: int) -> list[Tensor]:
    return [part.flatten(0, 1) for part in tensor.unflatten(0, (heads, parts, -1)).unbind(dim=1)]


def weight_and_bias(make: Callable[[str, str], Stored], name: str, ours: str, bias: bool) -> list[Stored]:
    """A layer's weight by `make`, and its bias as it is, where it has one."""
    return [make(f"{name}.weight", f"{ours}.weight")] + ([same(f"{name}.bias", f"{ours}.bias")] if bias else [])
