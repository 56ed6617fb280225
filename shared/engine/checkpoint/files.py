"""Chapter 04. Checkpoint files and resharding: a process writes its shards of each tensor, and a run in another layout reads what it needs.

    weights-rank-00001.safetensors     `blocks.0.feed_forward.up_proj.weight[512:1024]`          a span: numbers 512 to 1023, flattened
                                       `blocks.0.attention.o_proj.weight[0:24,12:24]`             a box: columns 12 to 23 of all rows
                                       `blocks.0.attention.o_proj.weight[0:24,12:24][100:200]`    a span of a box

A key without a region is a whole tensor in its shape: all that a single process writes, to `weights.safetensors`. Regions come with the
layouts of chapter 06, and any layout reads a checkpoint of any other. No rank ever assembles a full tensor that it does not hold: regions
are intersected as boxes, and only the rows that are needed are read from the memory-mapped files.

Left out on purpose: `torch.distributed.checkpoint`. There a shard must be a box, one per file and name, so a flattened span cannot be
expressed; and it exchanges its plans over `torch.distributed`, which does not work for ranks that are threads.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from shared.engine.checkpoint.soundness import CheckpointError, DamagedCheckpoint, Described, difference, table_entry
from shared.model.sharding import Box, Region, whole_region
from shared.tensor_files import save_tensors

Shards = dict[tuple[str, Region], Tensor]  # name of a tensor, and where the numbers lie in the whole
KEY = re.compile(r"(.+?)(?:\[(\d+:\d+(?:,\d+:\d+)*)\])?(?:\[(\d+):(\d+)\])?")


class StoredShard(NamedTuple):
    """A shard in a file: its key, and its region of the full tensor."""

    file: Any
    key: str
    region: Region


class ShardFiles:
    """Reader of this process's shards of a checkpoint's tensors. Without arguments it reads full tensors.

    Args:
        weights: name -> where this rank's numbers of a weight lie in the whole.
        optimizer: the same for the parameters that its optimizer steps, and so for their state.
        elsewhere: names that other ranks hold, and this one does not.
    """

    def __init__(
        self, weights: Mapping[str, Region] | None = None, optimizer: Mapping[str, Region] | None = None, elsewhere: Collection[str] = ()
    ):
        self.wanted: dict[str, Mapping[str, Region]] = {"weights": weights or {}, "optimizer": optimizer or {}}
        self.elsewhere = set(elsewhere)

    def read(self, folder: Path, name: str, expected: Any) -> dict[str, Tensor]:
        """The numbers of each tensor of a set, in the shape of this rank's box, or flat. State of which it holds nothing is left out, and
        what only other ranks hold.

        Args:
            name: of the set: `weights`, `optimizer`, `random`.
            expected: its entry in the table of contents.

        Raises:
            DamagedCheckpoint: the shards are not what the table of contents says, or do not make up the whole of each tensor.
            CheckpointError: a tensor has another shape than this run's.
        """
        with ExitStack() as files:
            found: dict[str, list[StoredShard]] = {}
            for path in files_of(folder, name):
                try:
                    of_file = shards_in(files.enter_context(safe_open(path, "pt")))
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    raise DamagedCheckpoint.of(folder, f"{path.name} does not say where its numbers lie ({error}).") from error
                for entry, shards in of_file.items():
                    found.setdefault(entry, []).extend(shards)
            if wrong := wrong_shards(found) or difference(whole_tensors(found), expected):
                raise DamagedCheckpoint.of(folder, f"{wrong}.")
            wanted = {entry: self.region_of(folder, name, entry, shards[0].region.shape) for entry, shards in found.items()}
            return {entry: read_region(folder, entry, found[entry], region) for entry, region in wanted.items() if region is not None}

    def region_of(self, folder: Path, name: str, entry: str, shape: tuple[int, ...]) -> Region | None:
        """The region of an entry that this rank needs, if any. A step count, which is not sharded, is needed where a part of its
        parameter is."""
        parameter = entry.split("/", 1)[1] if name == "optimizer" else entry
        if name not in self.wanted:
            return whole_region(shape)
        mine = self.wanted[name].get(parameter)
        if mine is None:
            return None if parameter in self.elsewhere else whole_region(shape)
        if name == "optimizer" and not mine.numel:
            return None
        if mine.shape == shape:
            return mine
        if name == "weights" or math.prod(shape) > 1:
            raise CheckpointError(
                f"{folder} does not fit this run. {entry} is {list(mine.shape)} here and {list(shape)} in the saved run: resume with the "
                "model that was saved."
            )
        return whole_region(shape)


def wrong_shards(found: Mapping[str, Sequence[StoredShard]]) -> str | None:
    """What is wrong with stored shards as parts of their tensors; None where they add up to the whole of each. Gaps are found where the
    shards are read, and without gaps, parts that add up do not overlap. A step count is in several files, and counts once."""
    for entry, shards in found.items():
        shape = shards[0].region.shape
        for file, key, region in shards:
            ends = [start + size for start, size in zip(region.offsets, region.sizes, strict=True)]
            if len(ends) != len(region.shape) or region.shape != shape or any(end > size for end, size in zip(ends, shape, strict=True)):
                return f"{key} is not a part of a tensor of shape {list(shape)}"
            if tuple(file.get_slice(key).get_shape()) != tuple(region.local_shape) or region.stop > math.prod(region.sizes):
                return f"{key} has the shape {list(file.get_slice(key).get_shape())}"
        if dtypes := sorted({str(empty_like(shard).dtype) for shard in shards})[1:]:
            return f"{entry} is of several dtypes, {dtypes[0].removeprefix('torch.')} among them"
        if (held := sum(region.numel for region in {shard.region for shard in shards})) != math.prod(shape):
            return f"its files hold {held} of the {math.prod(shape)} numbers of {entry}"
    return None


def whole_tensors(found: Mapping[str, Sequence[StoredShard]]) -> Described:
    return {entry: table_entry(empty_like(shards[0]).dtype, shards[0].region.shape) for entry, shards in found.items()}


def empty_like(shard: StoredShard) -> Tensor:
    """A tensor of a stored shard's dtype; of a count of steps, which has no dimension to slice, the shard itself."""
    view = shard.file.get_slice(shard.key)
    return view[:0] if view.get_shape() else shard.file.get_tensor(shard.key)


def rank_file(name: str, rank: int, ranks: int) -> str:
    """The file of a set of tensors: with the rank's number where there are several."""
    return f"{name}-rank-{rank:05d}.safetensors" if ranks > 1 else f"{name}.safetensors"


def files_of(folder: Path, name: str) -> list[Path]:
    """One process's file, or the files of all ranks."""
    whole = folder / f"{name}.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob(f"{name}-rank-*.safetensors"))


def key_of(name: str, region: Region) -> str:
    """The key of a shard in a file."""
    box = ",".join(f"{start}:{start + size}" for start, size in zip(region.offsets, region.sizes, strict=True))
    key = name if region.sizes == region.shape else f"{name}[{box}]"
    return key if region.is_box else f"{key}[{region.start}:{region.stop}]"


def whole_shards(tensors: Mapping[str, Tensor]) -> Shards:
    return {(name, whole_region(tensor.shape)): tensor.detach() for name, tensor in tensors.items()}


def write_files(folder: Path, files: Mapping[str, Shards]) -> dict[str, dict[str, Any]]:
    """Write this process's files. Returns the fingerprint of each, by its name."""
    for name, shards in files.items():
        write_shards(folder / name, shards)
    return {name: fingerprint(folder / name) for name in files}


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_shards(path: Path, shards: Shards) -> None:
    shapes = {name: region.shape for name, region in shards if not region.is_whole}
    tensors = {}
    for (name, region), tensor in shards.items():
        tensors[key_of(name, region)] = tensor.detach().cpu().reshape(region.local_shape).contiguous()
    save_tensors(tensors, path, metadata={"shapes": json.dumps(shapes)} if shapes else None)


def contents_of(files: Mapping[str, Shards]) -> dict[str, Described]:
    """This process's share of the table of contents: by set of tensors, dtype and shape of the whole of each of which it writes a shard.
    Each rank's random state is a separate set."""
    found: dict[str, Described] = {}
    for file, shards in files.items():
        name = Path(file).stem
        tensors = found.setdefault(name if name.startswith("random") else name.split("-")[0], {})
        for (entry, region), tensor in shards.items():
            tensors[entry] = table_entry(tensor.dtype, region.shape)
    return found


def shards_in(file: Any) -> dict[str, list[StoredShard]]:
    """The shards in a file, by tensor name."""
    shapes = json.loads((file.metadata() or {}).get("shapes", "{}"))
    found: dict[str, list[StoredShard]] = {}
    for key in file.keys():
        match = KEY.fullmatch(key)
        if match and match[1] in shapes:
            name, region = match[1], region_from(tuple(shapes[match[1]]), *match.groups()[1:])
        else:
            name, region = key, whole_region(file.get_slice(key).get_shape())
        found.setdefault(name, []).append(StoredShard(file, key, region))
    return found


def region_from(shape: tuple[int, ...], box: str | None, start: str | None, stop: str | None) -> Region:
    """Parse the region in a key. A single range of a tensor with several dimensions is a span; with one, span and box are the same."""
    ranges = [tuple(map(int, each.split(":"))) for each in box.split(",")] if box else []
    if len(ranges) == 1 and len(shape) != 1 and start is None:
        return whole_region(shape)._replace(start=ranges[0][0], stop=ranges[0][1])
    region = whole_region(shape)
    if ranges:
        sizes = tuple(last - first for first, last in ranges)
        region = Region(shape, tuple(first for first, _ in ranges), sizes, 0, math.prod(sizes))
    return region if start is None else region._replace(start=int(start), stop=int(stop))


def read_region(folder: Path, entry: str, shards: Sequence[StoredShard], wanted: Region) -> Tensor:
    """Read the elements of a region from the stored shards that overlap it."""
    flat = torch.empty(wanted.numel, dtype=empty_like(shards[0]).dtype)
    filled = torch.zeros(wanted.numel, dtype=torch.bool)
    for region, shard in {shard.region: shard for shard in shards}.items():
        for stored, at in region.boxes():
            for box, place in wanted.boxes():
                common = intersection(stored, box)
                if common is not None:
                    here, target = slice(place, place + math.prod(box.sizes)), within(common, box)
                    target.of(flat[here].view(box.sizes)).copy_(read_box(shard, stored, at, within(common, stored)))
                    target.of(filled[here].view(box.sizes)).fill_(True)
    if missing := int((~filled).sum()):
        raise DamagedCheckpoint.of(folder, f"of {entry}, {missing} numbers are in none of its files.")
    return flat.view(wanted.local_shape)


def intersection(one: Box, other: Box) -> Box | None:
    starts = [max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return Box(tuple(starts), tuple(sizes)) if all(size > 0 for size in sizes) else None


def within(inner: Box, outer: Box) -> Box:
    """The inner box, relative to the corner of the outer one."""
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def read_box(shard: StoredShard, stored: Box, at: int, wanted: Box) -> Tensor:
    """Read a box out of a stored box that begins at element `at` of its shard: complete rows, and no more of them than needed."""
    view = shard.file.get_slice(shard.key)
    if not view.get_shape():
        return shard.file.get_tensor(shard.key)
    row = math.prod(stored.sizes[1:])
    rows = (wanted.offsets[0], wanted.offsets[0] + wanted.sizes[0]) if stored.sizes else (0, 1)
    numbers = read_numbers(view, at + rows[0] * row, at + rows[1] * row)
    box = Box((0, *wanted.offsets[1:]), wanted.sizes)
    return box.of(numbers.view(rows[1] - rows[0], *stored.sizes[1:]))


def read_numbers(view: Any, start: int, stop: int) -> Tensor:
    """[stop - start] of a stored tensor's flattened numbers, read with the rest of the first and the last row around them."""
    row = max(math.prod(view.get_shape()[1:]), 1)
    first = start // row
    return view[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row].clone()
