"""Chapter 06. The cost of communication by formula (alpha-beta model): messages and bytes of collectives, beside what the trace counts.

    seconds = latency * messages + bytes / bandwidth

Messages follow each other, and bytes are those that a rank sends. B is the whole tensor, n the ranks, and operations go around a ring:

    all-reduce                    2 (n - 1) messages    2 (n - 1) / n B     never more than 2 B, however many ranks
    reduce-scatter, all-gather       n - 1                (n - 1) / n B     one half of the ring each

That an all-reduce cannot send less than the ring does is in Patarasuk and Yuan 2009.

Left out on purpose: shorter routes for short tensors (recursive doubling: Thakur, Rabenseifner and Gropp 2005), the time that adding takes,
and links that are shared, so that messages wait for each other.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.parallel.comm.trace import TraceEntry


@dataclass(frozen=True)
class Link:
    """A link between two ranks. latency: seconds until a message begins to arrive. bandwidth: bytes per second, in each direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cost:
    """The cost of the busiest rank. messages: sequential ones. bytes: sent in all of them."""

    messages: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.messages + other.messages, self.bytes + other.bytes)

    def seconds(self, link: Link) -> float:
        return link.latency * self.messages + self.bytes / link.bandwidth


FORMULAS: dict[str, Callable[[int, float], Cost]] = {  # operation -> (ranks, bytes of the whole tensor) -> cost
    "all_reduce": lambda n, b: Cost(2 * (n - 1), 2 * (n - 1) / n * b),
    "reduce_scatter": lambda n, b: Cost(n - 1, (n - 1) / n * b),
    "all_gather": lambda n, b: Cost(n - 1, (n - 1) / n * b),
    "broadcast": lambda n, b: Cost(math.ceil(math.log2(n)), math.ceil(math.log2(n)) * b),  # down a tree: of the root
    "all_to_all": lambda n, b: Cost(n - 1, (n - 1) / n * b),  # each other rank's piece, directly
    "send": lambda n, b: Cost(1, b),
    "receive": lambda n, b: Cost(0, 0.0),  # counted by the sender
    "barrier": lambda n, b: Cost(0, 0.0),
}


def cost(operation: str, bytes: float, ranks: int) -> Cost:
    """The cost of an operation, by its name in the trace. bytes: of the full tensor; for all_to_all, of all that the rank sends, its own
    part included."""
    if operation not in FORMULAS:
        raise ValueError(f"There is no formula for {operation}: known are {', '.join(FORMULAS)}.")
    return FORMULAS[operation](ranks, bytes) if ranks > 1 else Cost(0, 0.0)


def cost_of_entries(entries: Iterable[TraceEntry]) -> Cost:
    """The cost of a trace's entries, by the formulas."""
    return sum((cost(entry.operation, entry.bytes, entry.size) for entry in entries), Cost(0, 0.0))


@dataclass(frozen=True)
class Exchange:
    """Equal operations of a step. part: what of the model they belong to. ranks: of the group. bytes: of the whole tensor, in each call."""

    part: str
    operation: str
    axis: str
    ranks: int
    calls: float
    bytes: float


def total_cost(exchanges: Iterable[Exchange]) -> Cost:
    """The cost of all of them, sequentially."""
    each = ((exchange.calls, cost(exchange.operation, exchange.bytes, exchange.ranks)) for exchange in exchanges)
    return sum((Cost(calls * one.messages, calls * one.bytes) for calls, one in each), Cost(0, 0.0))
