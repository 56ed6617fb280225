"""Chapter 06. What communication costs: messages and bytes by formula, to be held against what the trace has counted.

    seconds = latency * messages + bytes / bandwidth

Messages follow each other, and bytes are those that a rank sends. B is the whole tensor, n the ranks:

    all-reduce, ring                2 (n - 1) messages    2 (n - 1) / n B     never more than 2 B, however many ranks
    all-reduce, recursive doubling    log2 n              log2 n B            few messages: for short tensors
    reduce-scatter, all-gather           n - 1              (n - 1) / n B     one half of the ring each

Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", sections 3 and 4; that an all-reduce
cannot send less than the ring is in Patarasuk and Yuan 2009. What a strategy moves in a step: Rajbhandari et al. 2020, "ZeRO", section 7.

Left out on purpose: the time that adding up takes, and links that are shared, so that messages wait for each other.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.parallel.comm.trace import TraceEntry

Strategy = Literal["ddp", "zero1", "zero2", "fsdp"]


@dataclass(frozen=True)
class Link:
    """How two ranks are joined. latency: seconds until a message begins to arrive. bandwidth: bytes per second, in each direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cost:
    """What the rank with the most to do has to do. messages: one after another. bytes: sent in them, together, or received where it sends
    nothing meanwhile."""

    messages: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.messages + other.messages, self.bytes + other.bytes)

    def seconds(self, link: Link) -> float:
        return link.latency * self.messages + self.bytes / link.bandwidth


@dataclass(frozen=True)
class Exchange:
    """An operation of a group, as the trace would list it. bytes: of the whole tensor that it is about."""

    operation: str
    bytes: int


def doublings(ranks: int) -> int:
    if ranks & (ranks - 1):
        raise ValueError(f"Recursive doubling and halving pair the ranks up: {ranks} is no power of two.")
    return ranks.bit_length() - 1


FORMULAS: dict[tuple[str, str], Callable[[int, float], Cost]] = {  # (operation, route) -> (ranks, bytes of the whole tensor) -> cost
    ("all_reduce", "ring"): lambda n, b: Cost(2 * (n - 1), 2 * (n - 1) / n * b),
    ("all_reduce", "through root"): lambda n, b: Cost(2 * (n - 1), 2 * (n - 1) * b),  # of the root: it receives, then it sends
    ("all_reduce", "recursive doubling"): lambda n, b: Cost(doublings(n), doublings(n) * b),
    ("all_reduce", "recursive halving and doubling"): lambda n, b: Cost(2 * doublings(n), 2 * (n - 1) / n * b),  # Rabenseifner
    ("reduce_scatter", "ring"): lambda n, b: Cost(n - 1, (n - 1) / n * b),
    ("reduce_scatter", "recursive halving"): lambda n, b: Cost(doublings(n), (n - 1) / n * b),
    ("all_gather", "ring"): lambda n, b: Cost(n - 1, (n - 1) / n * b),
    ("all_gather", "recursive doubling"): lambda n, b: Cost(doublings(n), (n - 1) / n * b),
    ("broadcast", "tree"): lambda n, b: Cost(math.ceil(math.log2(n)), math.ceil(math.log2(n)) * b),  # of the root
    ("all_to_all", "ring"): lambda n, b: Cost(n - 1, (n - 1) / n * b),  # each other rank's piece, directly
    ("send", "ring"): lambda n, b: Cost(1, b),
}
DEFAULT_ROUTE = {"broadcast": "tree"}


def cost(operation: str, bytes: float, ranks: int, route: str | None = None) -> Cost:
    """What an operation costs the rank that does most.

    Args:
        operation: as the trace calls it. Receiving costs nothing: somebody else has sent it.
        bytes: of the whole tensor; for all_to_all, of all that the rank hands out, its own piece among it.
        route: how it is carried out; by default around a ring, or directly, and for a broadcast down a tree.

    Raises:
        ValueError: there is no such route, or not for so many ranks.
    """
    if operation in ("receive", "barrier") or ranks == 1:
        return Cost(0, 0.0)
    route = route or DEFAULT_ROUTE.get(operation, "ring")
    if (operation, route) not in FORMULAS:
        routes = [other for name, other in FORMULAS if name == operation]
        raise ValueError(f"There is no formula for {operation} by {route}: known are {', '.join(routes) or 'other operations only'}.")
    return FORMULAS[operation, route](ranks, bytes)


def cost_of_entries(entries: Iterable[TraceEntry]) -> Cost:
    """What a rank has sent, by the formulas, for all that its trace lists."""
    return sum((cost(entry.operation, entry.bytes, entry.size) for entry in entries), Cost(0, 0.0))


def step_exchanges(strategy: Strategy, parts: Sequence[int], microbatches: int = 1, reshard: bool = True) -> list[Exchange]:
    """What a rank says in a training step, apart from the few numbers of totals and norm.

    With P parameters, 2 bytes each or 4, that is by the ring's formula: ddp 2 P, zero1 2 P, fsdp 3 P a step, times (n - 1) / n.

    Args:
        strategy: ddp sums gradients. zero1 and zero2 scatter them, update parts and gather weights, zero2 after each micro-batch.
            fsdp gathers weights before each use.
        parts: bytes of what travels together: buckets of gradients; for fsdp the units, of which the first stays gathered from the
            forward to the backward pass, since it is used at both ends of the model.
        microbatches: of a step. ddp and zero1 add gradients up at home until the last one.
        reshard: whether fsdp lets weights go after the forward pass and gathers them again for the backward pass.
    """
    if strategy == "ddp":
        return [Exchange("all_reduce", bytes) for bytes in parts]
    if strategy in ("zero1", "zero2"):
        scatters = [Exchange("reduce_scatter", bytes) for bytes in parts]
        return scatters * (microbatches if strategy == "zero2" else 1) + [Exchange("all_gather", bytes) for bytes in parts]
    root, *blocks = parts
    backward = [Exchange(operation, bytes) for bytes in reversed(blocks) for operation in ("all_gather", "reduce_scatter")]
    if not reshard:
        backward = [exchange for exchange in backward if exchange.operation == "reduce_scatter"]
    forward = [Exchange("all_gather", bytes) for bytes in parts]
    return microbatches * [*forward, *backward, Exchange("reduce_scatter", root)]


def step_cost(exchanges: Iterable[Exchange], ranks: int) -> Cost:
    """What a rank does for them, one after the other."""
    return sum((cost(exchange.operation, exchange.bytes, ranks) for exchange in exchanges), Cost(0, 0.0))
