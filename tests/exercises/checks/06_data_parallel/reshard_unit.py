"""Check of 06.reshard_unit. Oracle: torch's sum over the ranks' gradients laid end to end, cut into equal parts.

Ranks are threads. Memory that is not filled holds NaN here, so what was taken for zero and is not shows.

Tolerances. Digits and small whole numbers are exact. The oracle adds float64 numbers in another order: 1e-12.
"""

from contextlib import contextmanager

import torch

from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.checking import Case, Check
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.trace import Work

from .watched import CONTRACT, begun, finished, over_ranks, overlaps

DIGITS = "arithmetic: rank i's gradients are 10^i times [1, 2, 3, ...], so each digit says how often that rank was counted"
ORACLE = "torch.stack of the flattened, padded gradients, .sum(0)"


def digits(ranks: int, shapes, *, unused=(), padding: int = 0, dtype=torch.float64, of=torch.float64):
    """rank i's gradients: 10^i times 1, 2, 3, ... over all parameters. unused: (rank, parameter) that has none."""
    return made(ranks, shapes, unused, padding, dtype, of, lambda rank, total: 10.0**rank * torch.arange(1.0, total + 1))


def random(ranks: int, shapes, *, unused=(), padding: int = 0, dtype=torch.float64, of=torch.float64):
    draw = lambda rank, total: torch.randn(total, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)  # noqa: E731
    return made(ranks, shapes, unused, padding, dtype, of, draw)


def made(ranks, shapes, unused, padding, dtype, of, values):
    def given():
        sizes = [torch.Size(shape).numel() for shape in shapes]
        gradients = []
        for rank in range(ranks):
            parts = zip(values(rank, sum(sizes)).to(of).split(sizes), shapes, strict=True)
            gradients.append([None if (rank, place) in unused else part.view(shape) for place, (part, shape) in enumerate(parts)])
        return {"gradients": gradients, "sizes": sizes, "padding": padding, "dtype": dtype}

    return given


def transposed(*shapes):
    """Two ranks, whose first gradient is the transpose of a matrix."""
    given = digits(2, shapes)
    return lambda: (made := given()) | {"gradients": [[first.T, *others] for first, *others in made["gradients"]]}


def in_bfloat16(*ranks):
    gradients = lambda: [[torch.tensor(values, dtype=torch.bfloat16)] for values in ranks]  # noqa: E731
    return lambda: {"gradients": gradients(), "sizes": [len(ranks[0])], "padding": 0, "dtype": torch.float32}


@contextmanager
def unfilled_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def weights_of(gradients, sizes, padding):
    """[size * n] weights, whose dtype is that of the gradients."""
    of = next(each for of_rank in gradients for each in of_rank if each is not None).dtype
    return torch.ones(sum(sizes) + padding, dtype=of)


def reduced(function, gradients, sizes, padding, dtype):
    def work(world):
        whole = weights_of(gradients, sizes, padding)
        mine, length = gradients[world.rank], len(whole)
        result = function(whole, mine, sizes, dtype, world)
        if not isinstance(result, tuple) or len(result) != 2:
            return {"returned something else than a shard and an operation under way": True}
        shard, operation = result
        problem = finished(operation)
        still = {} if len(whole) == length else {"the tensor `whole` has another length now": len(whole)}
        return {"shard": shard, "bytes of the weights": whole.untyped_storage().nbytes()} | problem | still

    with unfilled_memory_is_nan():
        return over_ranks(work, len(gradients))


def summed(gradients, sizes, padding, dtype):
    rows = []
    for of_rank in gradients:
        flat = [torch.zeros(size) if each is None else each.flatten() for each, size in zip(of_rank, sizes, strict=True)]
        rows.append(torch.cat([each.to(dtype) for each in flat] + [torch.zeros(padding, dtype=dtype)]))
    parts = torch.stack(rows).sum(0).chunk(len(rows))
    return {f"rank {rank}": {"shard": part, "bytes of the weights": 0} for rank, part in enumerate(parts)}


def used(function, gradients, sizes, padding, dtype):
    """What was begun, before anybody waits for it, and how much memory the shard holds on to."""

    def work(world):
        whole, parts, reduce_scatter = weights_of(gradients, sizes, padding), [], world.reduce_scatter
        world.reduce_scatter = lambda part, of, asynchronous=False: parts.append((part, of)) or reduce_scatter(part, of, asynchronous)
        shard, operation = function(whole, gradients[world.rank], sizes, dtype, world)
        told = begun(world, "reduce_scatter")
        problem = finished(operation)
        wrong_place = any(overlaps(part, of, world.rank) for part, of in parts)
        told |= {"bytes that the shard keeps": shard.untyped_storage().nbytes(), "a part lies at another rank's place": wrong_place}
        return told | problem

    return over_ranks(work, len(gradients))


class Buffers(TorchDispatchMode):
    """Notes the bytes of the weights whenever a tensor as long as they are is made."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.seen, self.ended = whole, [], False

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **named or {})
        if isinstance(result, torch.Tensor) and result.numel() >= self.whole.numel() and not self.ended:
            if result.untyped_storage().data_ptr() != self.whole.untyped_storage().data_ptr():
                self.seen.append(self.whole.untyped_storage().nbytes())
        return result


def most_at_a_time(function, gradients, sizes, padding, dtype):
    def work(world):
        whole = weights_of(gradients, sizes, padding)
        with Buffers(whole) as buffers:
            _, operation = function(whole, gradients[world.rank], sizes, dtype, world)
        problem = finished(operation)
        return {"bytes of the weights when the first buffer of their length was made": buffers.seen[:1]} | problem

    return over_ranks(work, len(gradients))


def none_at_a_time(gradients, **arguments):
    about = "bytes of the weights when the first buffer of their length was made"
    return {f"rank {rank}": {about: [0]} for rank in range(len(gradients))}


def devices(function, gradients, sizes, padding, dtype):
    """Where things lie when the weights are not on the CPU: on meta, a device that every machine has, of shapes without numbers."""
    world, handed = SingleRankCommunicator(), []
    world.reduce_scatter = lambda part, of, asynchronous=False: handed.append(of) or Work()
    whole = weights_of(gradients, sizes, padding).to("meta")
    mine = [None if each is None else each.to("meta") for each in gradients[0]]
    shard, operation = function(whole, mine, sizes, dtype, world)
    problem = finished(operation)
    return {"what is added up lies on": [str(each.device) for each in handed], "the shard lies on": str(shard.device)} | problem


def on_meta(**_):
    return {"what is added up lies on": ["meta"], "the shard lies on": "meta"}


def one_reduction(gradients, sizes, padding, dtype):
    bytes = (sum(sizes) + padding) * dtype.itemsize
    told = {"operations": ["reduce_scatter"], "bytes": [bytes], "waited for before it was returned": False}
    told |= {"bytes that the shard keeps": bytes // len(gradients), "a part lies at another rank's place": False}
    return {f"rank {rank}": told for rank in range(len(gradients))}


def case(rung: str, title: str, given, source: str = DIGITS, expected=summed, observe=reduced, tolerance: float = 0.0) -> Case:
    return Case(rung, title, given, expected, source, observe, rtol=tolerance, atol=tolerance)


CHECK = Check(
    exercise="06.reshard_unit",
    outputs=("shard", "work"),
    spoilt=("numbers of shard when done",),
    cases=[
        case("shape and dtype", "two ranks, one matrix", digits(2, [(2, 3)]), CONTRACT),
        case("worked example", "one rank, one vector", digits(1, [(3,)])),
        case("worked example", "three ranks, a matrix and a vector", digits(3, [(2, 3), (3,)])),
        case("worked example", "two ranks, and 1 number of padding", digits(2, [(5,), (2, 3), (2,)], padding=1)),
        case("property", "rank 0 has not used the first parameter", digits(2, [(2,), (4,)], unused=[(0, 0)])),
        case("property", "no rank has used the second", digits(2, [(2,), (4,), (2,)], unused=[(0, 1), (1, 1)])),
        case("property", "one rank has used nothing", digits(3, [(2, 2), (5,)], unused=[(1, 0), (1, 1)])),
        case("property", "a gradient that is not contiguous", transposed((2, 3), (4,))),
        case(
            "property", "bfloat16 gradients, added in float32", in_bfloat16([256.0, 1.0], [1.0, 256.0]),
            "arithmetic: 256 + 1 is 257, which bfloat16 has not",
        ),
        case(
            "property", "weights and gradients on another device than the CPU", digits(1, [(2, 3), (3,)], unused=[(0, 1)]),
            CONTRACT, on_meta, devices,
        ),
        case(
            "property", "bfloat16 weights and gradients, and added in bfloat16",
            digits(2, [(2, 3), (3,)], padding=1, dtype=torch.bfloat16, of=torch.bfloat16),
        ),
        case("oracle", "random numbers", random(2, [(7, 5), (5,), (3, 11)], padding=1), ORACLE, tolerance=1e-12),
        case(
            "two ranks", "random numbers, of which both ranks lack some", random(2, [(7,), (5, 3)], unused=[(0, 1), (1, 0)]), ORACLE,
            tolerance=1e-12,
        ),
        case("budget", "weights are freed first", digits(2, [(2, 3), (5,)], padding=1), CONTRACT, none_at_a_time, most_at_a_time),
        case("budget", "one reduction, under way when it is returned", digits(3, [(2, 3), (5,)], padding=1), CONTRACT, one_reduction, used),
        case(
            "budget", "the bytes of `dtype`", digits(2, [(2, 3), (5,)], padding=1, dtype=torch.float32, of=torch.bfloat16), CONTRACT,
            one_reduction, used,
        ),
    ],
)  # fmt: skip
