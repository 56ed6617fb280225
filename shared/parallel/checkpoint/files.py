"""Chapter 06. The files of a checkpoint of which each rank writes a part, and reads what it needs, whoever wrote it.

    weights-rank-00001.safetensors     `stack.blocks.0.feed_forward.up_proj.weight[512:1024]`
                                       numbers 512 to 1023 of that tensor, flattened

A key without a range is a whole tensor in its shape, so what one process writes (chapter 04) is the simplest case, and every layout reads
every other's. Nothing is ever put together on one rank: `get_slice` reads a range, or the rows that hold it, out of the mapped file.

Left out on purpose: `torch.distributed.checkpoint`. A part there is a box within a tensor, one per file and name, and a range of flattened
numbers is none; its plans travel by `torch.distributed` alone, so it knows no ranks that are threads.
"""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.engine.checkpoint.folder import CheckpointError, Safetensors

PART = re.compile(r"(.+)\[(\d+):(\d+)\]")


class Place(NamedTuple):
    """Where numbers stand in a tensor. shape: of the whole; start, stop: within its flattened numbers."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == torch.Size(self.shape).numel()


class Part(NamedTuple):
    """Numbers in a file: under which key, and where they stand in the tensor that they are of."""

    file: Any
    key: str
    place: Place


class RankFiles:
    """A `Storage`: reads the parts that one rank needs. What it writes by itself is all whole, in the files of chapter 04.

    Args:
        weights: name -> what this rank holds of a weight, where that is not all of it.
        state: the same for the optimizer's state of a parameter.
    """

    def __init__(self, weights: Mapping[str, Place] | None = None, state: Mapping[str, Place] | None = None):
        self.wanted = {"weights": weights or {}, "optimizer": state or {}}

    def write(self, folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
        Safetensors().write(folder, name, tensors)

    def read(self, folder: Path, name: str) -> dict[str, Tensor]:
        """This rank's part of each tensor, flat, or in its shape where that is all of it. State of which it holds nothing is left out.

        Raises:
            CheckpointError: a tensor has another shape than this run's, or ranges are missing.
        """
        with ExitStack() as files:
            found: dict[str, list[Part]] = {}
            for path in files_of(folder, name):
                file = files.enter_context(safe_open(path, "pt"))
                for entry, part in parts_in(file).items():
                    found.setdefault(entry, []).extend(part)
            wanted = {entry: self.place_of(folder, name, entry, parts[0].place.shape) for entry, parts in found.items()}
            if name == "optimizer":
                wanted = {entry: place for entry, place in wanted.items() if place.start < place.stop}
            return {entry: read_place(folder, entry, found[entry], place) for entry, place in wanted.items()}

    def place_of(self, folder: Path, name: str, entry: str, shape: tuple[int, ...]) -> Place:
        """What this rank needs of an entry. A count of steps, which is no cut tensor, is needed wherever a part of the parameter is."""
        size = torch.Size(shape).numel()
        cut = self.wanted.get(name, {}).get(entry.split("/", 1)[-1])
        if cut is None or cut.shape == shape:
            return cut or Place(shape, 0, size)
        if name == "weights" or size > 1:
            raise CheckpointError(
                f"{folder} does not fit this run. {entry} is {list(cut.shape)} here and {list(shape)} in the saved run: resume with the "
                "model that was saved."
            )
        return Place(shape, 0, size if cut.start < cut.stop else 0)


def rank_file(name: str, rank: int, ranks: int) -> str:
    """One of several ranks has a number in its files' names; one alone writes chapter 04's."""
    return f"{name}-rank-{rank:05d}.safetensors" if ranks > 1 else f"{name}.safetensors"


def files_of(folder: Path, name: str) -> list[Path]:
    """One process's file, or those of the ranks."""
    whole = folder / f"{name}.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob(f"{name}-rank-*.safetensors"))


def write_parts(path: Path, parts: Mapping[tuple[str, Place], Tensor]) -> None:
    """One rank's file: (name, where) -> the numbers there."""
    shapes = {name: place.shape for name, place in parts if not place.is_whole}
    tensors = {}
    for (name, place), tensor in parts.items():
        key, shape = (name, place.shape) if place.is_whole else (f"{name}[{place.start}:{place.stop}]", (-1,))
        tensors[key] = tensor.detach().cpu().reshape(shape).contiguous()
    save_file(tensors, path, metadata={"shapes": json.dumps(shapes)} if shapes else None)


def parts_in(file: Any) -> dict[str, list[Part]]:
    """What a file holds, by the names of the tensors that it is of."""
    shapes = json.loads((file.metadata() or {}).get("shapes", "{}"))
    found: dict[str, list[Part]] = {}
    for key in file.keys():
        match = PART.fullmatch(key)
        if match and match[1] in shapes:
            name, place = match[1], Place(tuple(shapes[match[1]]), int(match[2]), int(match[3]))
        else:
            shape = tuple(file.get_slice(key).get_shape())
            name, place = key, Place(shape, 0, torch.Size(shape).numel())
        found.setdefault(name, []).append(Part(file, key, place))
    return found


def read_place(folder: Path, entry: str, parts: list[Part], wanted: Place) -> Tensor:
    """The numbers of a range, from the parts that hold them."""
    pieces, position = [parts[0].file.get_slice(parts[0].key)[:0].flatten()] if wanted.shape else [], wanted.start
    for part in sorted(parts, key=lambda part: part.place.start):
        stop = min(wanted.stop, part.place.stop)
        if part.place.start <= position < stop:
            pieces.append(numbers_of(part, position, stop))
            position = stop
    if position != wanted.stop:
        raise CheckpointError(f"The checkpoint {folder} is damaged: of {entry}, the numbers from {position} on are in none of its files.")
    flat = torch.cat(pieces)
    return flat.view(wanted.shape) if wanted.is_whole else flat


def numbers_of(part: Part, start: int, stop: int) -> Tensor:
    """[stop - start], read with no more than the rest of the first and the last row around it."""
    start, stop = start - part.place.start, stop - part.place.start
    view = part.file.get_slice(part.key)
    shape = view.get_shape()
    if not shape:
        return part.file.get_tensor(part.key).reshape(1)
    row = max(torch.Size(shape[1:]).numel(), 1)
    first = start // row
    return view[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row].clone()
