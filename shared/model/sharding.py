"""Chapter 02. Sharding specs: which elements of a parameter a rank holds, as an attribute of the parameter.

    whole     [0 1 2 3 4 5]      box    rows 0:2, columns 3:6     [3 4 5]       what tensor and expert parallelism compute with
              [6 7 8 9 a b]                                       [9 a b]
                                 span   numbers 1:4 of that box    4 5 9        what ZeRO and FSDP store and update

A box has an offset and a size in each dimension; a span is a range of flattened numbers. Shardings nest: FSDP cuts a span out of the
box that tensor parallelism has cut out of the whole. Code that shards a parameter sets up to three attributes of it:

    sharding       how this rank's numbers lie in the whole (`Sharding`); absent where the parameter is whole
    shared_over    the group over which its gradient is added; absent: the data-parallel ranks
    partial_over   the group over which its gradient is partial, so that it must be all-reduced there; absent: none

Optimizer, gradient norm and checkpoint read these facts, and no layout's name. Parameters of other pipeline stages are simply absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

FACTS = ("role", "full_precision", "kept_elsewhere", "shared_over", "partial_over")  # what a shard copies, beside its sharding

Range = tuple[int, int]  # start and stop within a parameter's flattened numbers


class Group(Protocol):
    """The ranks that share a parameter; `shared.parallel.comm.communicator.Communicator` is one."""

    rank: int
    size: int

    def all_gather(self, into: Tensor, tensor: Tensor, asynchronous: bool = False) -> object: ...


class Box(NamedTuple):
    """A slice of a tensor in each dimension: what DTensor, distributed checkpoints and safetensors mean by a shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The box of a tensor: a view [sizes]."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes


class Span(NamedTuple):
    """A range of a tensor's flattened numbers: what ZeRO and FSDP mean by a shard."""

    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The span of a tensor, [stop - start]: a view where the tensor is contiguous."""
        return tensor.reshape(-1)[self.start : self.stop]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start,)


class Region(NamedTuple):
    """Where numbers lie in a whole tensor of `shape`: a box, and in it the span `start` to `stop` of its flattened numbers.

    The sharding without its ranks, to be compared, sent and written into a checkpoint's keys.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_box(self) -> bool:
        """Whether the span is all of the box, so that the numbers have the box's shape."""
        return self.numel == math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape and self.is_box

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.sizes if self.is_box else (self.numel,)

    def boxes(self) -> Iterator[tuple[Box, int]]:
        """The region as boxes of the whole (part of a row, whole rows, part of a row), each with its offset in the region's numbers."""
        for box, first in boxes_of_span(self.sizes, self.start, self.stop):
            yield Box(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.sizes), first - self.start


def boxes_of_span(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """A range of the flattened numbers of a tensor of `sizes` as boxes, each with the flat number at which it begins."""
    if start >= stop:
        return
    if stop - start == math.prod(sizes):
        yield Box((0,) * len(sizes), tuple(sizes)), start
        return
    if len(sizes) == 1:
        yield Box((start,), (stop - start,)), start
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:  # within one row
        yield from in_row(sizes, last, start, stop, row)
        return
    yield from in_row(sizes, first - 1, start, first * row, row)
    if first < last:
        yield Box((first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])), first * row
    yield from in_row(sizes, last, last * row, stop, row)


def in_row(sizes: Sequence[int], number: int, start: int, stop: int, row: int) -> Iterator[tuple[Box, int]]:
    """A range that lies within one row of a tensor."""
    for box, first in boxes_of_span(sizes[1:], start - number * row, stop - number * row):
        yield Box((number, *box.offsets), (1, *box.sizes)), number * row + first


def whole_region(shape: Sequence[int]) -> Region:
    return Region(tuple(shape), (0,) * len(shape), tuple(shape), 0, math.prod(shape))


@dataclass(frozen=True)
class Sharding:
    """How one parameter is sharded over the ranks of a group.

    Args:
        outer_shape: of what is cut here: the whole parameter, or, where `outer` is given, this rank's shard of that.
        parts: for each rank of `group`, the box or the span that it holds. Together they hold each number at least once; spans hold it
            once, and may be empty.
        group: the ranks that share it.
        outer: the sharding that this one is nested in, such as tensor parallelism's around FSDP's.
        device: where it is gathered; None for where the shard is. An offloaded optimizer's shard is gathered where ranks can talk.
    """

    outer_shape: torch.Size
    parts: tuple[Box | Span, ...]
    group: Group
    outer: Sharding | None = None
    device: torch.device | None = None

    def __post_init__(self):
        numel, held = self.outer_shape.numel(), sum(math.prod(part.shape) for part in dict.fromkeys(self.parts))  # copies count once
        spans = sorted(part for part in self.parts if isinstance(part, Span) and part.start != part.stop)
        ends = [0, *(span.stop for span in spans)]
        overlap = bool(spans) and [span.start for span in spans] != ends[:-1]
        if len(self.parts) != self.group.size or held != numel or (spans and (overlap or ends[-1] != numel)):
            raise ValueError(
                f"A parameter of shape {tuple(self.outer_shape)} cannot be sharded over {self.group.size} ranks as "
                f"{[tuple(part) for part in self.parts]}: give each rank a part, so that each of its {numel} numbers is held once."
            )

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.outer.shape if self.outer else self.outer_shape

    @property
    def here(self) -> Box | Span:
        """What this rank holds of `outer_shape`."""
        return self.parts[self.group.rank]

    @property
    def region(self) -> Region:
        """Where this rank's numbers lie in the whole parameter."""
        around = self.outer.region if self.outer else whole_region(self.outer_shape)
        if isinstance(self.here, Span):
            return around._replace(start=self.here.start, stop=self.here.stop)
        offsets = tuple(a + b for a, b in zip(around.offsets, self.here.offsets, strict=True))
        return Region(around.shape, offsets, self.here.sizes, 0, math.prod(self.here.sizes))

    @property
    def is_owned(self) -> bool:
        """Whether this rank has all that is sharded here, as with Muon's matrices under ZeRO: other ranks have nothing, or the same."""
        return math.prod(self.here.shape) == self.outer_shape.numel() > 0

    @property
    def needs_gathering(self) -> bool:
        """Whether a per-matrix operation (Muon) needs other ranks. False where only the stack dimension is split, as with experts."""
        region = self.region
        if len(self.shape) > 2 and region.is_box and region.sizes[-2:] == tuple(self.shape[-2:]):
            return False
        return not self.is_owned or (self.outer is not None and self.outer.needs_gathering)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's shard: the shape of a box, [n] of a span, and the parameter's own where this rank owns it."""
        return tuple(self.outer_shape) if self.is_owned else self.here.shape

    def local(self, whole: Tensor) -> Tensor:
        """The whole, in `shape` -> this rank's shard, in `local_shape`: a view where `whole` is contiguous."""
        around = self.outer.local(whole) if self.outer else whole
        return self.here.of(around).view(self.local_shape) if self.is_owned else self.here.of(around)

    def gather(self, part: Tensor, everyone: bool = False) -> Tensor:
        """All-gather this rank's shard into the whole parameter, in `shape`. Uneven shards are padded to the longest.

        Args:
            everyone: whether every rank of the groups calls it and gets the whole. If not, what a rank owns takes no other rank, and those
                that hold nothing of it must not call.
        """
        part = part if self.device is None else part.to(self.device)
        around = part.reshape(self.outer_shape) if self.is_owned and not everyone else self.gather_here(part)
        return self.outer.gather(around, everyone) if self.outer else around

    def gather_here(self, part: Tensor) -> Tensor:
        longest = max(math.prod(each.shape) for each in self.parts)
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part.reshape(-1)
        gathered = part.new_empty(self.group.size, longest)
        self.group.all_gather(gathered, padded)
        whole = part.new_empty(self.outer_shape)
        for each, row in zip(self.parts, gathered, strict=True):
            each.of(whole).copy_(row[: math.prod(each.shape)].view(each.shape))
        return whole

    def on(self, device: torch.device) -> Sharding:
        """The same sharding, gathered on `device`."""
        return replace(self, device=device)


def split_dimension(parameter: Tensor, dimension: int, ranges: Sequence[Range], group: Group) -> Sharding:
    """A slice of a dimension for each rank: how tensor parallelism shards a matrix, `fully_shard` rows, or expert parallelism a stack."""
    boxes = []
    for start, stop in ranges:
        offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
        offsets[dimension], sizes[dimension] = start, stop - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return Sharding(parameter.shape, tuple(boxes), group, sharding_of(parameter))


def cut_parameter(module: nn.Module, name: str, dimension: int, ranges: Sequence[Range], group: Group) -> nn.Parameter:
    """Replace a parameter of a module by this rank's slice of a dimension, which has the parameter's other attributes."""
    whole = getattr(module, name)
    sharding = split_dimension(whole, dimension, ranges, group)
    part = nn.Parameter(sharding.here.of(whole.detach()).clone(), requires_grad=whole.requires_grad)
    vars(part).update(vars(whole) | {"sharding": sharding})
    setattr(module, name, part)
    return part


def split_spans(parameter: Tensor, ranges: Sequence[Range], group: Group) -> Sharding:
    """A span of the flattened numbers for each rank, nested in the parameter's own sharding."""
    return Sharding(parameter.shape, tuple(Span(*each) for each in ranges), group, sharding_of(parameter))


def sharding_of(parameter: Tensor) -> Sharding | None:
    """A parameter's sharding; None where it is whole."""
    return getattr(parameter, "sharding", None)


def part_sizes(parameter: Tensor) -> list[int]:
    """How many numbers of a parameter each rank of its group has. Shards of shards are planned by the most that any has, so that ranks
    whose parts of one parameter differ in size (a vocabulary that does not divide) still lay out everything else in the same way."""
    sharding = sharding_of(parameter)
    return [parameter.numel()] if sharding is None else [math.prod(part.shape) for part in sharding.parts]


def region_of(parameter: Tensor) -> Region:
    """Where the numbers that this rank holds of a parameter lie in the whole."""
    sharding = sharding_of(parameter)
    return sharding.region if sharding else whole_region(parameter.shape)


def make_shard(part: Tensor, sharding: Sharding, like: nn.Parameter) -> nn.Parameter:
    """A rank's shard as a parameter for the optimizer: a view, so that a step changes `part`'s memory.

    Args:
        part: the numbers, in any shape.
        sharding: where they lie in the whole.
        like: the parameter that they are of, whose facts and `requires_grad` the shard takes over.
    """
    shard = nn.Parameter(part.detach().view(sharding.local_shape), requires_grad=like.requires_grad)
    shard.sharding = sharding
    return copy_facts(like, shard)


def copy_facts(source: Tensor, target: nn.Parameter) -> nn.Parameter:
    """Copy to `target` the attributes of `source` other than its sharding."""
    for fact in FACTS:
        if hasattr(source, fact):
            setattr(target, fact, getattr(source, fact))
    return target
