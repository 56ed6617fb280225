"""Check of 06.ring_all_reduce. Oracle: torch's sum over the stacked tensors; the group's trace for what was sent.

Ranks are threads, each with a tensor of its own. A send is over once its receive has begun, as with gloo and NCCL, and ending with work
that was never waited for is refused.

Tolerances. Digits and whole numbers are exact. The oracle adds float64 numbers in another order: 1e-12.
"""

import torch

from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

CONTRACT = "the contract"
DIGITS = "arithmetic: rank i holds 10^i times [1, 2, 3, ...], so each digit says how often that rank was counted"
ORACLE = "torch.stack(tensors).sum(0)"


def digits(ranks: int, length: int, **more):
    return lambda: {"tensors": [10.0**rank * torch.arange(1.0, length + 1) for rank in range(ranks)]} | more


def random(ranks: int, *shape: int, dtype=torch.float64):
    def given():
        generators = [torch.Generator().manual_seed(7 + rank) for rank in range(ranks)]
        return {"tensors": [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for generator in generators]}

    return given


def on_every_rank(function, tensors):
    """What each rank holds afterwards, and that the function returns nothing."""

    def work(world):
        tensor = tensors[world.rank].clone()
        returned = function(tensor, world)
        return {"tensor": tensor} | ({} if returned is None else {"returned a value": True})

    return {f"rank {rank}": result for rank, result in enumerate(run_threads(work, len(tensors)))}


def the_sum(tensors):
    return {f"rank {rank}": {"tensor": torch.stack(tensors).sum(0)} for rank in range(len(tensors))}


def in_groups(function, tensors, groups):
    def work(world):
        tensor = tensors[world.rank].clone()
        function(tensor, world.split("dp", groups))
        return tensor

    return {f"global rank {rank}": result for rank, result in enumerate(run_threads(work, len(tensors)))}


def sums_of_groups(tensors, groups):
    sums = {rank: torch.stack([tensors[member] for member in group]).sum(0) for group in groups for rank in group}
    return {f"global rank {rank}": sums[rank] for rank in range(len(tensors))}


def bits(function, tensors):
    """Whether each rank holds the very bits that rank 0 holds, and the sum to float32's precision."""
    results = [each["tensor"] for each in on_every_rank(function, tensors).values()]
    unlike = [rank for rank, result in enumerate(results) if not torch.equal(result, results[0])]
    return {"rank 0": results[0], "ranks with other bits than rank 0": unlike}


def used(function, tensors):
    """What was sent and received, as the trace and a look at each tensor handed over tell; memory by the storages received into."""
    longest = -(-tensors[0].numel() // len(tensors)) * tensors[0].element_size()

    def work(world):
        tensor = tensors[world.rank].clone()
        place, sent, received, send, receive = tensor.untyped_storage().data_ptr(), [], [], world.send, world.receive
        receivers = set()
        world.send = lambda piece, to, asynchronous=False: receivers.add(to) or sent.append(piece) or send(piece, to, asynchronous)
        world.receive = lambda piece, source, asynchronous=False: received.append(piece) or receive(piece, source, asynchronous)
        function(tensor, world)
        storages = [piece.untyped_storage() for piece in received if piece.untyped_storage().data_ptr() != place]
        return {
            "entries": world.trace.entries, "other receivers": sorted(receivers - {(world.rank + 1) % world.size}),
            "numbers": [piece.numel() for piece in sent],
            "from elsewhere": sum(piece.untyped_storage().data_ptr() != place for piece in sent if piece.numel()),
            "beside": max((storage.nbytes() for storage in storages), default=0),
        }

    ranks = run_threads(work, len(tensors))
    sends = [[entry.bytes for entry in rank["entries"] if entry.operation == "send"] for rank in ranks]
    lengths = [count for rank in ranks for count in rank["numbers"]]
    return {
        "operations": sorted({entry.operation for rank in ranks for entry in rank["entries"]}),
        "sends of each rank": [len(each) for each in sends],
        "ranks that each sent to, its next one excepted": [rank["other receivers"] for rank in ranks],
        "numbers in the shortest chunk sent": min(lengths, default=0),
        "bytes sent by all ranks together": sum(map(sum, sends)),
        "chunks in the longest send": -(-max(map(max, sends), default=0) // longest),
        "sends that were not straight from the tensor": sum(rank["from elsewhere"] for rank in ranks),
        "chunks in the longest buffer beside the tensor": -(-max(rank["beside"] for rank in ranks) // longest),
    }


def budget(tensors):
    ranks, numbers, bytes = len(tensors), tensors[0].numel(), tensors[0].nbytes
    return {
        "operations": ["receive", "send"], "sends of each rank": [2 * (ranks - 1)] * ranks,
        "ranks that each sent to, its next one excepted": [[]] * ranks,
        "numbers in the shortest chunk sent": numbers // ranks,
        "bytes sent by all ranks together": 2 * (ranks - 1) * bytes, "chunks in the longest send": 1,
        "sends that were not straight from the tensor": 0,
        "chunks in the longest buffer beside the tensor": 1,
    }  # fmt: skip


def nothing(tensors):
    return {"tensor": tensors[0], "operations": []}


def alone(function, tensors):
    def work(world):
        tensor = tensors[0].clone()
        function(tensor, world)
        return {"tensor": tensor, "operations": sorted({entry.operation for entry in world.trace.entries})}

    return run_threads(work, 1)[0]


CHECK = Check(
    exercise="06.ring_all_reduce",
    outputs=(),
    spoilt=("update of tensor", "elements of tensor"),
    cases=[
        Case("shape and dtype", "three ranks, [3, 5] in float32", random(3, 3, 5, dtype=torch.float32), the_sum, CONTRACT, on_every_rank),
        Case(
            "shape and dtype", "two ranks, whole numbers", lambda: {"tensors": [torch.arange(4), torch.arange(4)]}, the_sum, CONTRACT,
            on_every_rank,
        ),
        # Not two ranks first: with two, both phases have one step, and wrong answers come out alike that are not.
        Case("worked example", "three ranks, three numbers", digits(3, 3), the_sum, DIGITS, on_every_rank, rtol=0.0),
        Case("worked example", "two ranks, two numbers", digits(2, 2), the_sum, DIGITS, on_every_rank, rtol=0.0),
        Case("worked example", "four ranks, eight numbers", digits(4, 8), the_sum, DIGITS, on_every_rank, rtol=0.0),
        Case("worked example", "four ranks, five numbers: chunks differ in length", digits(4, 5), the_sum, DIGITS, on_every_rank, rtol=0.0),
        Case("worked example", "five ranks, two numbers: some chunks are empty", digits(5, 2), the_sum, DIGITS, on_every_rank, rtol=0.0),
        Case("property", "a single rank keeps what it has, and sends nothing", digits(1, 3), nothing, CONTRACT, alone, rtol=0.0),
        Case(
            "property", "ranks 1, 3 and 4 are one group, 0 and 2 another", digits(5, 6, groups=[[1, 3, 4], [0, 2]]), sums_of_groups,
            DIGITS + "; the contract: ranks count within the group", in_groups, rtol=0.0,
        ),
        Case(
            "property", "five ranks, 13 numbers in float32: the same bits everywhere", random(5, 13, dtype=torch.float32),
            lambda tensors: {"rank 0": torch.stack(tensors).double().sum(0).float(), "ranks with other bits than rank 0": []},
            "the contract", bits, rtol=1e-5, atol=1e-6,
        ),
        Case("oracle", "seven ranks, [5, 11]", random(7, 5, 11), the_sum, ORACLE, on_every_rank, rtol=1e-12, atol=1e-12),
        Case(
            "budget", "four ranks, [2, 11]: what was sent, and what was held", random(4, 2, 11), budget,
            "the contract, counted in the trace of each rank: 2 (n - 1) sends of one chunk each", used,
        ),
        Case(
            "budget", "five ranks, two numbers: an empty chunk is sent too", digits(5, 2), budget,
            "the contract, counted in the trace of each rank: 2 (n - 1) sends of one chunk each, an empty one too", used,
        ),
    ],
)  # fmt: skip
