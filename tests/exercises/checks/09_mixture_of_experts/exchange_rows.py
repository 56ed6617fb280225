"""Check of 09.exchange_rows. Oracle: torch's autograd in one process, where a row that is sent is a slice of another rank's tensor.

Ranks are threads. sent[r][s] is how many rows rank r sends to rank s; its row number j for s is 100 r + 10 s + j, and more by 1000 for each
feature. The gradients that arrive from behind are given; nobody may have written to them.

Tolerances. Rows and their gradients are moved, not computed: exact. Products of small layers: 1e-12 in float64.
"""

import gc
import weakref

import torch

from shared.course.checking import Check
from shared.parallel.comm.threads import run_threads

from .common import CONTRACT, cases_of, randn
from .pieces import unchanged

ONE_PROCESS = "torch's autograd in one process"
ROWS = "arithmetic: row j from rank r to rank s is 100 r + 10 s + j"
UNEVEN = [[2, 0, 3], [1, 4, 0], [5, 1, 1]]
IDLE = [[2, 0, 1], [0, 0, 0], [3, 0, 2]]  # rank 1 sends and receives nothing
RECEIVER = [[0, 3, 0], [0, 0, 0], [0, 2, 0]]  # rank 1 only receives
ONE_WAY = [[0, 2], [0, 0]]
NOTHING = [[0, 0], [0, 0]]


def of(sent, width=2, dtype=torch.float64, how="contiguous"):
    """Each rank's rows, and the gradient that arrives there for each row that it receives: 1, 2, 3, ... times 1000 for the rank."""

    def given():
        ranks = range(len(sent))
        features = 1000 * torch.arange(width)
        row = lambda r, s, count: 100 * r + 10 * s + torch.arange(count).view(-1, 1) + features  # noqa: E731
        rows = [torch.cat([row(r, s, count) for s, count in enumerate(sent[r])]).to(dtype) for r in ranks]
        received = [list(numbers) for numbers in zip(*sent, strict=True)]
        back = [(1000 * (r + 1) + torch.arange(width * sum(received[r])).view(-1, width)).to(dtype) for r in ranks]
        if how == "transposed":
            rows, back = ([each.T.contiguous().T for each in tensors] for tensors in (rows, back))
        if how == "one number":
            shown = lambda r, tensor: torch.tensor(7.0 + r, dtype=dtype).expand_as(tensor)  # noqa: E731
            rows, back = ([shown(r, each) for r, each in enumerate(tensors)] for tensors in (rows, back))
        return {"rows": rows, "sent": [list(line) for line in sent], "received": received, "gradient": back}

    return given


def over_ranks(work, sent, received):
    """`work(world, the numbers that it sends, the numbers that it receives)` on each rank, by rank."""
    run = lambda world: work(world, list(sent[world.rank]), list(received[world.rank]))  # noqa: E731
    return {f"rank {rank}": found for rank, found in enumerate(run_threads(run, len(sent)))}


def traveled(rows, sent):
    """What each rank receives, as slices of all ranks' tensors."""
    pieces = [own.split(line) for own, line in zip(rows, sent, strict=True)]
    return [torch.cat([own[rank] for own in pieces]) for rank in range(len(sent))]


def exchanged(function, rows, sent, received, gradient):
    """The rows that arrive, and the gradient of the rows that were sent."""

    def work(world, leaving, arriving):
        leaf = rows[world.rank].detach().requires_grad_()
        found = function(leaf, leaving, arriving, world)
        [back] = torch.autograd.grad(found, [leaf], gradient[world.rank])
        return {"received": found.detach(), "gradient of rows": back} | unchanged(leaving, arriving)

    return over_ranks(work, sent, received)


def at_once(rows, sent, received, gradient):
    leaves = [own.detach().clone().requires_grad_() for own in rows]
    arrived = traveled(leaves, sent)
    found = torch.autograd.grad(arrived, leaves, gradient)
    return {
        f"rank {rank}": {"received": arrived[rank].detach(), "gradient of rows": found[rank]} | unchanged(sent[rank], received[rank])
        for rank in range(len(sent))
    }  # fmt: skip


def answer(arriving, back):
    """Expected: what each rank receives, by its first feature, and the gradient of its rows, by theirs."""

    def told(rows, sent, received, gradient):
        ranks = {}
        for rank in range(len(sent)):
            arrived, returned = (torch.tensor(numbers[rank], dtype=rows[rank].dtype).view(-1, 1) for numbers in (arriving, back))
            ranks[f"rank {rank}"] = {"received": arrived, "gradient of rows": returned} | unchanged(sent[rank], received[rank])
        return ranks

    return told


def in_groups(function, rows, sent, received, gradient, groups):
    """Ranks count within their group; `sent` and `received` are by global rank and place in the group."""

    def work(world):
        group = world.split("ep", groups)
        leaf = rows[world.rank].detach().requires_grad_()
        found = function(leaf, list(sent[world.rank]), list(received[world.rank]), group)
        return {"received": found.detach(), "gradient of rows": torch.autograd.grad(found, [leaf], gradient[world.rank])[0]}

    return {f"rank {rank}": found for rank, found in enumerate(run_threads(work, len(rows)))}


def by_group(rows, sent, received, gradient, groups):
    told = {}
    for group in groups:
        own = [[each[rank] for rank in group] for each in (rows, sent, received, gradient)]
        for rank, found in zip(group, at_once(*own).values(), strict=True):
            told[f"rank {rank}"] = {name: value for name, value in found.items() if "unchanged" not in name}
    return dict(sorted(told.items()))


def grouped(sent, groups):
    """Arguments of `in_groups`: sent[r][place] is how many rows global rank r sends to a place of its group."""

    def given():
        whole = [[0] * len(sent) for _ in sent]
        for group in groups:
            for rank in group:
                for place, member in enumerate(group):
                    whole[rank][member] = sent[rank][place]
        made = of(whole)()
        for rank in (rank for group in groups if group != sorted(group) for rank in group):
            made["rows"][rank] = made["rows"][rank].flip(0)  # rows are sorted by the place that they go to
        members = {rank: group for group in groups for rank in group}
        received = [[sent[member][members[rank].index(rank)] for member in members[rank]] for rank in range(len(sent))]
        return made | {"sent": [list(line) for line in sent], "received": received, "groups": groups}

    return given


def twice(function, rows, sent, received, gradient):
    """There and back with a factor of the rank's own in between, twice, before anything flows back."""

    def work(world, leaving, arriving):
        leaf = rows[world.rank].detach().requires_grad_()
        found = leaf
        for factor in (2.0, 3.0):
            there = function(found, leaving, arriving, world) * (factor + world.rank)
            found = function(there, arriving, leaving, world)
        [back] = torch.autograd.grad(found, [leaf], rows[world.rank].detach() + 1)
        return {"there and back": found.detach(), "gradient of rows": back}

    return over_ranks(work, sent, received)


def of_twice(rows, sent, received, gradient):
    told = {}
    for rank, line in enumerate(sent):
        factors = torch.cat([torch.full((count, 1), (2.0 + to) * (3.0 + to)) for to, count in enumerate(line)]).to(rows[rank].dtype)
        told[f"rank {rank}"] = {"there and back": rows[rank] * factors, "gradient of rows": (rows[rank] + 1) * factors}
    return told


def mixture(function, x, first, second, choice, ranks):
    """Tokens and experts on ranks: each rank's tokens travel to the expert of their choice, and what it makes of them travels back."""
    parts = torch.arange(len(x)).tensor_split(ranks)

    def work(world):
        mine = parts[world.rank]
        mine = mine[choice[mine].argsort(stable=True)]
        count = lambda own, rank: int((choice[own] == rank).sum())  # noqa: E731
        leaving, arriving = [count(mine, rank) for rank in range(ranks)], [count(own, world.rank) for own in parts]
        leaves = [each.detach().clone().requires_grad_() for each in (x[mine], first[world.rank], second[world.rank])]
        made = (function(leaves[0], leaving, arriving, world) @ leaves[1]).tanh() @ leaves[2]
        found = function(made, arriving, leaving, world)
        back = torch.autograd.grad(found, leaves, x[mine] + 1)
        return {"tokens": mine, "value": found.detach()} | dict(zip(("of x", "of A", "of B"), back, strict=True))

    return {f"rank {rank}": found for rank, found in enumerate(run_threads(work, ranks))}


def in_one(x, first, second, choice, ranks):
    leaves = [each.detach().clone().requires_grad_() for each in (x, first, second)]
    found = torch.einsum("ni,nij->nj", torch.einsum("ni,nij->nj", leaves[0], leaves[1][choice]).tanh(), leaves[2][choice])
    of_x, of_first, of_second = torch.autograd.grad(found, leaves, x + 1)
    told = {}
    for rank, mine in enumerate(torch.arange(len(x)).tensor_split(ranks)):
        mine = mine[choice[mine].argsort(stable=True)]
        told[f"rank {rank}"] = {"tokens": mine, "value": found[mine].detach(), "of x": of_x[mine]}
        told[f"rank {rank}"] |= {"of A": of_first[rank], "of B": of_second[rank]}
    return told


def layer(tokens, ranks, choice=None):
    made = {"x": randn(tokens, 5, seed=1), "first": randn(ranks, 5, 11, seed=2), "second": randn(ranks, 11, 5, seed=3), "ranks": ranks}
    made["choice"] = torch.tensor(choice) if choice else torch.randint(ranks, (tokens,), generator=torch.Generator().manual_seed(4))
    return lambda: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in made.items()}


def plain(function, rows, sent, received, gradient):
    """Rows without a gradient: what arrives has none either. Who writes to it afterwards changes nobody's rows."""

    def work(world, leaving, arriving):
        found = function(rows[world.rank], leaving, arriving, world)
        kept = found.clone()
        found.zero_()
        return {"received": kept, "wants a gradient": found.requires_grad}

    return over_ranks(work, sent, received)


def of_plain(rows, sent, received, gradient):
    return {f"rank {rank}": {"received": found, "wants a gradient": False} for rank, found in enumerate(traveled(rows, sent))}


def used(function, rows, sent, received, gradient):
    """What each pass sends, and whether rows are sent from where they lie and received where they stay."""

    def work(world, leaving, arriving):
        pieces, all_to_all = [], world.all_to_all
        world.all_to_all = lambda received, out, **more: pieces.append((received, out)) or all_to_all(received, out, **more)
        leaf = rows[world.rank].detach().requires_grad_()
        found = function(leaf, leaving, arriving, world)
        marks, told = len(world.trace.entries), {}
        [back] = torch.autograd.grad(found, [leaf], gradient[world.rank])
        entries = [f"{entry.operation} of {entry.bytes} bytes" for entry in world.trace.entries]
        told |= {"sent forward": entries[:marks], "sent backward": entries[marks:]}
        place = lambda tensor: tensor.untyped_storage().data_ptr()  # noqa: E731
        ends = [("forward", leaf, found), ("backward", gradient[world.rank], back)]
        for (name, given, result), (received, out) in zip(ends, pieces, strict=False):
            told[f"copied before it was sent, {name}"] = any(each.numel() and place(each) != place(given) for each in out)
            told[f"copied after it arrived, {name}"] = any(each.numel() and place(each) != place(result) for each in received)
            told[f"bytes that the result holds, {name}"] = result.untyped_storage().nbytes()
        return told

    return over_ranks(work, sent, received)


def kept(function, rows, sent, received, gradient):
    """What stays of a tensor of rows that nobody else holds, until the backward pass."""

    def work(world, leaving, arriving):
        packed, made = [], rows[world.rank].detach().requires_grad_() * 1
        alive = weakref.ref(made)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.numel()) or x, lambda x: x):
            found = function(made, leaving, arriving, world)
        del made
        if alive() is not None:
            gc.collect()
        return {"rows are kept for the backward pass": bool(sum(packed)) or alive() is not None, "gradient": found.requires_grad}

    return over_ranks(work, sent, received)


def moved_once(rows, sent, received, gradient):
    told = {}
    for rank, line in enumerate(sent):
        size = rows[rank].shape[1] * rows[rank].itemsize
        there, back = sum(line) * size, sum(other[rank] for other in sent) * size
        told[f"rank {rank}"] = {"sent forward": [f"all_to_all of {there} bytes"], "sent backward": [f"all_to_all of {back} bytes"]}
        for name, held in (("forward", back), ("backward", there)):
            told[f"rank {rank}"] |= {f"copied before it was sent, {name}": False, f"copied after it arrived, {name}": False}
            told[f"rank {rank}"] |= {f"bytes that the result holds, {name}": held}
    return told


case = cases_of(at_once, ONE_PROCESS, exchanged, 0.0)

CHECK = Check(
    exercise="09.exchange_rows",
    outputs=("received",),
    spoilt=("received", "gradients through received"),
    cases=[
        case("shape and dtype", "two ranks, float32 rows of 3", of([[1, 2], [3, 1]], 3, torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16", of([[1, 2], [3, 1]], 3, torch.bfloat16), source=CONTRACT),
        case("worked example", "two ranks: 0 sends 1 and 2 rows, 1 sends 3 and none", of([[1, 2], [3, 0]], 1),
             answer([[0, 100, 101, 102], [10, 11]], [[1000, 2000, 2001], [1001, 1002, 1003]]), ROWS),
        case("worked example", "rank 0 sends two rows to rank 1, and nothing else travels", of(ONE_WAY, 1),
             answer([[], [10, 11]], [[2000, 2001], []]), ROWS),
        case("worked example", "three ranks", of(UNEVEN)),
        case("property", "three ranks, one of which sends and receives nothing", of(IDLE)),
        case("property", "three ranks, one of which only receives", of(RECEIVER)),
        case("property", "no rows at all", of(NOTHING)),
        case("property", "a single rank", of([[4]])),
        case("property", "every rank keeps its own rows", of([[2, 0], [0, 3]])),
        case("property", "as many rows to each rank", of([[2, 2], [2, 2]])),
        case("property", "tensors that are not contiguous", of(UNEVEN, 3, how="transposed")),
        case("property", "one number in memory, shown for every row, as behind a sum", of(UNEVEN, 3, how="one number")),
        case("property", "ranks 1 and 3 are one group, 2 and 0 another", grouped([[1, 2], [3, 1], [2, 0], [0, 4]], [[1, 3], [2, 0]]),
             by_group, ROWS, in_groups),
        case("property", "rows without a gradient, and who writes to the result", of(UNEVEN), of_plain, CONTRACT, plain),
        case("property", "a single rank: who writes to the result", of([[3]]), of_plain, CONTRACT, plain),
        case("property", "whole numbers", of(UNEVEN, dtype=torch.int64), of_plain, CONTRACT, plain),
        case("property", "there and back, twice", of(UNEVEN, 1), of_twice, "arithmetic", twice, 1e-12),
        case("oracle", "five ranks", of([[r * s % 4 for s in range(5)] for r in range(1, 6)], 7)),
        case("two ranks", "a mixture of two experts on two ranks", layer(13, 2), in_one, ONE_PROCESS, mixture, 1e-12),
        case("two ranks", "... of three on three ranks, one of which no token chooses",
             layer(7, 3, [0, 2, 2, 0, 2, 0, 0]), in_one, ONE_PROCESS, mixture, 1e-12),
        case("budget", "what is kept for the backward pass", of([[1, 2], [3, 1]], 5), lambda sent, **_: {
            f"rank {rank}": {"rows are kept for the backward pass": False, "gradient": True} for rank in range(len(sent))}, CONTRACT, kept),
        case("budget", "what three ranks send and copy", of(UNEVEN, 5), moved_once, CONTRACT, used),
        case("budget", "... in bfloat16, with a rank that has nothing", of(IDLE, 5, torch.bfloat16), moved_once, CONTRACT, used),
    ],
)  # fmt: skip
