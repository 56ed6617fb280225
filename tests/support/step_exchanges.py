"""What a data-parallel strategy exchanges in a training step, by the books: the oracle of tests that count the comm trace.

Rajbhandari et al. 2020, "ZeRO", section 7.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.parallel.planning.costs import Cost, cost

Strategy = Literal["ddp", "zero1", "zero2", "fsdp"]


@dataclass(frozen=True)
class Exchange:
    """An operation of a group, as the trace would list it. bytes: of the whole tensor that it is about."""

    operation: str
    bytes: int


def step_exchanges(strategy: Strategy, parts: Sequence[int], microbatches: int = 1, reshard: bool = True) -> list[Exchange]:
    """Operations of a training step, apart from the few numbers of totals and norm.

    With P parameters, 2 bytes each or 4, that is by the ring's formula: ddp 2 P, zero1 2 P, fsdp 3 P a step, times (n - 1) / n.

    Args:
        strategy: ddp sums gradients. zero1 and zero2 scatter them, update parts and gather weights, zero2 after each micro-batch.
            fsdp gathers weights before each use.
        parts: bytes of what travels together: buckets of gradients; for fsdp the units, of which the first stays gathered from the
            forward to the backward pass, since it is used at both ends of the model.
        microbatches: of a step. ddp and zero1 add gradients up at home until the last one.
        reshard: whether fsdp frees whole weights after the forward pass and gathers them again for the backward pass.
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
    """Their cost, one after the other."""
    return sum((cost(exchange.operation, exchange.bytes, ranks) for exchange in exchanges), Cost(0, 0.0))
