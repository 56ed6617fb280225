"""Stage 12 of build 09: what cannot be right is refused on every rank, before any row is sent."""

import re
from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import TEXT, WIDTH, Results, batches_of, on_grid, randn, squared_error, weights_of

COUNTS = 64  # bytes of a call that sends numbers of rows or of tokens


def refusal_case(title: str, said: str, use: Callable[[Any, Communicator, Communicator], Any], **given: Any) -> Case:
    """A ValueError on each of two ranks whose sentence holds the numbers in `said`. use(adapters, group, replicas)."""
    wanted, numbers = f"ValueError that says {said}, and no row sent", set(re.findall(r"-?\d+", said))

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> str:
            group.trace.clear()
            try:
                use(adapters, group, same)
                return "accepted"
            except ValueError as error:
                if rows := [entry for entry in group.trace.entries if entry.bytes > COUNTS]:
                    return f"{type(error).__name__} after {len(rows)} calls that send rows, the first {rows[0].description}"
                told = set(re.findall(r"-?\d+", str(error))) >= numbers
                return wanted if told else f"{type(error).__name__}, which does not say {said}: {error}"

        return {f"rank {rank}": result for rank, result in enumerate(on_grid(on_rank, 2))}

    expected = lambda **_: {f"rank {rank}": wanted for rank in range(2)}  # noqa: E731
    return Case("property", title, lambda: {"ranks": 2} | given, expected, TEXT.format(12), observe)


def made(adapters: Any, group: Communicator, same: Communicator, experts: int = 4, k: int = 2) -> Any:
    return adapters.make_layer(weights_of(experts), k, True, group, same)


def making(title: str, said: str, experts: int, k: int) -> Case:
    return refusal_case(title, said, lambda *given: made(*given, experts, k), E=experts, k=k)


def calling(title: str, said: str, shape: tuple[int, ...], valid: tuple[int, ...]) -> Case:
    use = lambda adapters, *ranks: adapters.forward(made(adapters, *ranks), randn(*shape), torch.ones(valid).bool())  # noqa: E731
    return refusal_case(title, said, use, x=list(shape), valid=list(valid), D=WIDTH)


def exchanging(title: str, said: str, rows: int, sent: list[int], received: list[int]) -> Case:
    use = lambda adapters, group, _: adapters.exchange(randn(rows, 20), sent, received, group)  # noqa: E731
    return refusal_case(title, said, use, rows=rows, sent=sent, received=received)


def dispatching(title: str, said: str, experts: list[list[int]]) -> Case:
    use = lambda adapters, *_: adapters.dispatch(randn(len(experts), WIDTH), torch.tensor(experts), 4)  # noqa: E731
    return refusal_case(title, said, use, experts=experts, num_experts=4)


def stepping(title: str, said: str, microbatches: int) -> Case:
    batches = [(x, targets, torch.zeros_like(valid)) for x, targets, valid in batches_of([(2, 3)] * microbatches)]
    use = lambda adapters, *ranks: adapters.step(made(adapters, *ranks), batches, squared_error, 0.3, 0.1)  # noqa: E731
    return refusal_case(title, said, use, **{"micro-batches": microbatches, "tokens that count": 0})


BAD_INPUT = (
    making("five experts on two ranks", "5 and 2", 5, 2),
    making("no choice", "0 and 4", 4, 0),
    making("more choices than experts", "5 and 4", 4, 5),
    calling("tokens of another width", "7 and 5", (2, 3, 7), (2, 3)),
    calling("`valid` of another shape", "2, 3 and 4", (2, 3, WIDTH), (2, 4)),
    exchanging("numbers for three ranks", "3 and 2", 3, [1, 1, 1], [1, 1, 1]),
    exchanging("numbers that do not add up to the rows", "4 and 3", 3, [2, 2], [2, 2]),
    dispatching("an expert above the last", "6 and 4", [[0, 1], [6, 2]]),
    dispatching("a negative expert", "-1 and 4", [[0, 1], [3, -1]]),
    stepping("no micro-batches", "0", 0),
    stepping("no token of any rank counts", "0", 2),
)
