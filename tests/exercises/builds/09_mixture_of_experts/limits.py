"""Stage 11 of build 09: budgets of calls, bytes, products and memory.

Budgets are counted from communication traces, from matrix products, and from the tensors that operations make.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import (
    EXPERTS,
    TEXT,
    WIDTH,
    Results,
    Sizes,
    Whole,
    alone,
    batches_by_rank,
    in_words,
    on_grid,
    randn,
    squared_error,
    steps_case,
    weights_of,
)
from .watching import BYTES, WITHIN, Watch, budget

LEFT = 512  # bytes that a step may leave, gradients apart
SMALL = 128  # bytes of totals in a step
HIDDEN = "calls of gather_objects, which sends text and is not for training steps"


def arrived(whole: Whole, batches: list, size: int) -> list[int]:
    """How many rows come to each rank of a group, from all ranks of it."""
    load = whole.load([(x, targets, torch.ones_like(valid)) for x, targets, valid in batches])
    return [int(own.sum()) for own in load.chunk(size)]


class Sent:
    """Calls of a rank's communicators since this was made, and bytes that they sent. hidden: calls that are no traffic in the trace."""

    def __init__(self, *groups: Communicator):
        self.groups, self.number = groups, sum(group.number for group in groups)
        self.first = len(groups[0].trace.entries)

    def count(self) -> tuple[int, int, int]:
        entries = self.groups[0].trace.entries[self.first :]
        collectives = sum(group.number for group in self.groups) - self.number
        hidden = collectives - sum(entry.peer is None for entry in entries)
        return len(entries) + hidden, sum(entry.bytes for entry in entries if entry.operation != "receive"), hidden


def call_case(title: str, size: int, sizes: Sizes, experts: int, k: int, bias: list[float] | None = None) -> Case:
    """One call of forward on each rank, and its backward pass: communication, and products."""
    weights, everything = weights_of(experts, bias=bias), batches_by_rank(sizes)
    rows = arrived(Whole(weights, k, True), sum(everything, []), size)
    given = {"ranks": size, "tokens, B x S": in_words(sizes), "E": experts, "k": k, "D": WIDTH, "rows that come to each rank": rows}
    names = "calls forward", "calls backward", "bytes forward", "bytes backward", HIDDEN, "multiplications of numbers"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> Results:
            layer = adapters.make_layer(weights_of(experts, bias=bias), k, True, group, same)
            [(x, _, valid)] = everything[rank]
            x = x.clone().requires_grad_()
            calls = Sent(group, same)
            with Watch() as watch:
                y, *_ = adapters.forward(layer, x, valid)
                forward, calls = calls.count(), Sent(group, same)
                weights_here = [weight for weight in dict(adapters.state(layer)).values() if weight.requires_grad]
                torch.autograd.grad(y, [x, *weights_here], randn(*y.shape))
            backward, own = calls.count(), valid.numel() * k
            there_and_back = (own + rows[rank]) * WIDTH * BYTES
            work = 3 * 3 * rows[rank] * weights[EXPERTS[0]][0].numel() + 3 * valid.numel() * weights["router.weight"].numel()
            work += 3 * (own * WIDTH + 2 * valid.numel() * experts)  # weighted sums and the losses may be products as well
            said = (
                budget(forward[0], 3, "calls"),
                budget(backward[0], 2, "calls"),
                budget(forward[1], there_and_back + size * experts * 8, "bytes"),
                budget(backward[1], there_and_back, "bytes"),
                budget(forward[2] + backward[2], 0, "calls"),
                budget(watch.multiplications, work, "multiplications"),
            )
            return {f"{name} on rank {rank}": each for name, each in zip(names, said, strict=True)}

        return {name: value for own in on_grid(on_rank, size) for name, value in own.items()}

    expected = lambda **_: {f"{name} on rank {rank}": WITHIN for rank in range(size) for name in names}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(11), observe)


def exchange_case() -> Case:
    numbers, names = [[1, 3], [4, 0]], ("calls forward", "calls backward", "bytes forward", "bytes backward", HIDDEN)
    given = {"rows from each rank to each": numbers, "D": WIDTH}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> Results:
            rows, received = randn(sum(numbers[rank]), WIDTH).requires_grad_(), [row[rank] for row in numbers]
            calls = Sent(group)
            made = adapters.exchange(rows, list(numbers[rank]), list(received), group)
            forward, calls = calls.count(), Sent(group)
            torch.autograd.grad(made, rows, randn(*made.shape))
            backward = calls.count()
            said = (
                budget(forward[0], 1, "calls"),
                budget(backward[0], 1, "calls"),
                budget(forward[1], rows.nbytes, "bytes"),
                budget(backward[1], made.nbytes, "bytes"),
                budget(forward[2] + backward[2], 0, "calls"),
            )
            return {f"{name} on rank {rank}": each for name, each in zip(names, said, strict=True)}

        return {name: value for own in on_grid(on_rank, 2) for name, value in own.items()}

    expected = lambda **_: {f"{name} on rank {rank}": WITHIN for rank in range(2) for name in names}  # noqa: E731
    return Case("budget", "an exchange alone", lambda: given, expected, TEXT.format(11), observe)


def watched_step(
    adapters: Any, size: int, replicas: int, sizes: Sizes, experts: int, **widths: int
) -> list[tuple[Watch, tuple[int, int, int], int, int]]:
    """A step on every rank, its norm and a move of the bias: what was watched, calls and bytes of the step alone, the bytes of its
    gradients, and all bytes left."""

    def on_rank(group: Communicator, same: Communicator, rank: int) -> tuple[Watch, tuple[int, int, int], int, int]:
        layer = adapters.make_layer(weights_of(experts, **widths), 2, True, group, same)
        batches = batches_by_rank(sizes, widths.get("width", WIDTH))[rank]
        calls = Sent(group, same)
        with Watch(list(dict(adapters.state(layer)).values())) as watch:
            adapters.step(layer, batches, squared_error, 0.3, 0.1)
            sent = calls.count()
            adapters.gradient_norm(layer)
            adapters.update_bias(layer, 0.1)
        gradients = sum(gradient.nbytes for gradient in dict(adapters.gradients(layer)).values())
        return watch, sent, gradients, watch.bytes_alive()

    return on_grid(on_rank, size, replicas)


def step_case(title: str, size: int, replicas: int, sizes: Sizes, experts: int) -> Case:
    given = {"ranks of a group": size, "replicas": replicas, "tokens, B x S": in_words(sizes), "E": experts, "k": 2, "D": WIDTH}
    weights, everything, names = weights_of(experts), batches_by_rank(sizes), ("calls of a step", "bytes of a step", HIDDEN)
    router, own_experts = weights["router.weight"].nbytes, sum(weights[name].nbytes for name in EXPERTS) // size

    def limits(rank: int) -> tuple[int, int, int]:
        group, batches = rank // size * size, everything[rank]
        rows = 0
        for number, (_, _, valid) in enumerate(batches):
            all_ranks = [everything[other][number] for other in range(group, group + size)]
            rows += 2 * valid.numel() + arrived(Whole(weights, 2, True), all_ranks, size)[rank - group]
        travelling = 2 * rows * WIDTH * BYTES + len(batches) * size * experts * 8
        added = router * ((size > 1) + (replicas > 1)) + own_experts * (replicas > 1)  # with a group of size 1 nothing is sent
        return 5 * len(batches) + 12, travelling + added + SMALL, 0

    def observe(adapters: Any, **_: Any) -> Results:
        found: Results = {}
        for rank, (_, sent, *_) in enumerate(watched_step(adapters, size, replicas, sizes, experts)):
            for name, value, limit, unit in zip(names, sent, limits(rank), ("calls", "bytes", "calls"), strict=True):
                found[f"{name} on rank {rank}"] = budget(value, limit, unit)
        return found

    expected = lambda **_: {f"{name} on rank {rank}": WITHIN for rank in range(size * replicas) for name in names}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(11), observe)


def memory_case(title: str, about: str, rows: int, said: Callable[[Watch, int, int], str]) -> Case:
    """said(what was watched, bytes of gradients, bytes left) of a step in which ranks have `rows` rows of tokens, or half as many."""
    size, sizes, widths = 4, [[(rows, 2)], [(rows // 2, 4)], [(rows, 1)], [(rows, 2)]], {"width": 8, "inner": 64}
    given = {"ranks": size, "tokens, B x S": in_words(sizes), "E": size, "D": widths["width"], "I": widths["inner"]}

    def observe(adapters: Any, **_: Any) -> Results:
        steps = watched_step(adapters, size, 1, sizes, size, **widths)
        return {f"{about} on rank {rank}": said(watch, gradients, left) for rank, (watch, _, gradients, left) in enumerate(steps)}

    expected = lambda **_: {f"{about} on rank {rank}": WITHIN for rank in range(size)}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(11), observe)


def layer_call(adapters: Any, tokens: int) -> Callable[[], None]:
    layer, x = adapters.make_layer(weights_of(4), 2, True, *alone()), randn(tokens // 4, 4, WIDTH)

    def call() -> None:
        y, *losses = adapters.forward(layer, x, torch.ones(x.shape[:2], dtype=torch.bool))
        torch.autograd.backward([y, *losses], [torch.ones_like(each) for each in (y, *losses)])

    return call


BUDGETS = (
    exchange_case(),
    call_case("a call on two ranks", 2, [[(2, 3)], [(1, 4)]], 4, 2),
    call_case("a call on four ranks, one without tokens", 4, [[(2, 4)], [(0, 2)], [(2, 4)], [(2, 4)]], 4, 2),
    call_case("a call where all choose the same experts", 2, [[(2, 4)], [(2, 4)]], 6, 2, [0.0, 9.0, 0.0, 0.0, 9.0, 0.0]),
    step_case("a step on two ranks", 2, 1, [[(2, 3), (1, 2)], [(1, 4), (3, 1)]], 4),
    step_case("a step of two groups of two ranks", 2, 2, [[(2, 3)], [(1, 4)], [(1, 1)], [(2, 2)]], 4),
    memory_case(
        "no rank makes a tensor as large as a whole [E, I, D]", "the largest tensor", 2,
        lambda watch, *_: WITHIN if watch.largest < 4 * 64 * 8 else f"a tensor of {watch.largest:,} numbers was made",
    ),
    memory_case(
        "what is left after a step", "bytes left, gradients apart", 16,
        lambda _, gradients, left: budget((left - gradients) // LEFT * LEFT, LEFT - 1, "bytes"),  # whole parts of it: totals vary
    ),
    steps_case("budget", 11, layer_call),
)  # fmt: skip
