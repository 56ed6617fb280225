"""Routes for reduce-scatter and all-gather over gloo: its own, and others that come to the same result.

    python tests/benchmarks/gloo_routes.py                     2 and 4 ranks, four sizes
    python tests/benchmarks/gloo_routes.py --ranks 2 --rounds 15

A size is that of the whole tensor. In each round every route is taken once, in an order that turns from round to round; a route's time is
that of the slowest rank. Where all cores compute, a step pays for the CPU time, of gloo's threads too. Medians, with an interval that holds
the true median with 95 %, and the ratio to gloo's own route, round by round.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from side_by_side import interval_rank
from torch import Tensor

from shared.devices import keep_freed_memory
from shared.parallel.comm.communicator import Communicator
from shared.parallel.processes import gloo_routes
from shared.parallel.processes.launch import run_processes
from shared.parallel.processes.torchrun import all_gather_single, reduce_scatter_single

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "4 MiB": 2**22, "40 MiB": 40 * 2**20}
Route = Callable[[Tensor, Tensor, dist.ProcessGroup], None]


def waited(work: dist.Work, direct: bool) -> None:
    work.wait()


def own_reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter_single(part, whole, group=group)


def reduce_scatter_by(long: float, part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Ours, with sends and receives from `long` bytes on."""
    gloo_routes.LONG = long
    gloo_routes.reduce_scatter(part, whole, group, waited)()


def reduce_scatter_by_all_reduce(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(whole, group=group)
    part.copy_(whole.view(group.size(), -1)[group.rank()])


def own_all_gather(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    all_gather_single(whole, part, group)


def all_gather_by(long: float, part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    gloo_routes.LONG = long
    gloo_routes.all_gather(whole, part, group, waited)()


def all_gather_by_all_reduce(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    whole.zero_()
    whole.view(group.size(), -1)[group.rank()] = part
    dist.all_reduce(whole, group=group)


def own_all_reduce(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(whole, group=group)


def all_reduce_by(long: float, part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter_by(long, part, whole, group)
    all_gather_by(long, part, whole, group)


def all_reduce_by_wholes(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Everybody sends all of it to everybody, and adds in rank order."""
    arrived = [torch.empty_like(whole) for _ in range(group.size())]
    arrived[group.rank()].copy_(whole)
    gloo_routes.exchange([whole] * group.size(), arrived, group, waited)()
    torch.add(arrived[0], arrived[1], out=whole)
    for each in arrived[2:]:
        whole += each


ROUTES: dict[str, dict[str, Route]] = {
    "reduce_scatter": {
        "gloo's own": own_reduce_scatter,
        "all_to_all, then adding": partial(reduce_scatter_by, math.inf),
        "sends and receives, then adding": partial(reduce_scatter_by, 0),
        "all_reduce, then one's part": reduce_scatter_by_all_reduce,
    },
    "all_gather": {
        "gloo's own": own_all_gather,
        "all_to_all of copies": partial(all_gather_by, math.inf),
        "sends and receives": partial(all_gather_by, 0),
        "all_reduce of zeros and one's part": all_gather_by_all_reduce,
    },
    "all_reduce": {
        "gloo's own": own_all_reduce,
        "both by all_to_all": partial(all_reduce_by, math.inf),
        "both by sends and receives": partial(all_reduce_by, 0),
        "wholes to everybody, then adding": all_reduce_by_wholes,
    },
}


def figures_of(world: Communicator, operation: str, size: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Route -> round by round, the slowest rank's seconds, and the CPU seconds of a rank. Results are first compared with gloo's own."""
    keep_freed_memory()  # as a run does
    group, routes = world.torch_group, ROUTES[operation]
    wholes = torch.randn(size // 4, generator=torch.Generator().manual_seed(world.rank))
    part = wholes[: len(wholes) // world.size].clone()
    results = []
    for route in routes.values():
        into, whole = part.clone(), wholes.clone()
        route(into, whole, group)
        results.append(into if operation == "reduce_scatter" else whole)
        torch.testing.assert_close(results[-1], results[0], rtol=1e-5, atol=1e-5)
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in routes}
    names = list(routes)
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            into, whole = part.clone(), wholes.clone()
            dist.barrier(group)
            began, busy = time.perf_counter(), time.process_time()
            routes[name](into, whole, group)
            seconds, cpu = time.perf_counter() - began, time.process_time() - busy  # of all threads, gloo's among them
            slowest, together = torch.tensor(seconds, dtype=torch.float64), torch.tensor(cpu, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
            dist.all_reduce(together, dist.ReduceOp.SUM, group)
            if number >= 2:
                taken[name][0].append(slowest.item())
                taken[name][1].append(together.item() / world.size)
    return taken


def middle(values: list[float], form: str) -> str:
    """The median, and between which values it lies with 95 %."""
    ordered, rank = sorted(values), interval_rank(len(values))
    median, low, high = (format(value, form) for value in (statistics.median(values), ordered[rank - 1], ordered[-rank]))
    return f"{median} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--operation", nargs="*", default=list(ROUTES))
    options = parser.parse_args()
    for operation in options.operation:
        table = Table("ranks", "size", "route", "ms", "times gloo's own", "CPU ms a rank", "times gloo's own", title=operation)
        for ranks in options.ranks:
            for size, bytes in SIZES.items():
                taken = run_processes(partial(figures_of, operation=operation, size=bytes, rounds=options.rounds), ranks, timeout=600)[0]
                for route, figures in taken.items():
                    cells = []
                    for values, own in zip(figures, taken["gloo's own"], strict=True):
                        ratios = [value / reference for value, reference in zip(values, own, strict=True)]
                        cells += [middle([1000 * value for value in values], ".2f"), middle(ratios, ".2f")]
                    table.add_row(str(ranks), size, route, *cells)
        Console(width=180).print(table)


if __name__ == "__main__":
    main()
