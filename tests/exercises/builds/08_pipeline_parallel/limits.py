"""Build 08: work and memory of I and W (stage 7), and budgets (stage 9).

Budgets are counted from communication traces, from matrix products, and from the memory of the tensors that a step makes.
"""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator
from shared.parallel.pipeline.schedules import Action

from .pieces import TEXT, TOKENS, Batch, Model, Results, actions, batches_of, cut_of, even, in_words, on_pipelines, schedule_of, summed_loss

WITHIN = "within the budget"
BYTES = 8  # of a number in float64
SMALL = 64  # bytes of a message that holds no activations
LEFT = 256  # bytes that a step may leave, gradients apart
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def budget(value: int, limit: int, unit: str, least: int = 0) -> str:
    if value < least:
        return f"{value:,} {unit}, and there should be {least:,}"
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


class Watch(TorchDispatchMode):
    """Counts a rank's matrix products, and the bytes of tensors that were made under it.

    products: sends of more than a few numbers that the rank had started -> matrix products since.
    most: the most bytes at a time, as seen at each matrix product.
    """

    def __init__(self, group: Communicator, model: Model, memory: bool):
        super().__init__()
        self.group, self.memory, self.products, self.most = group, memory, Counter(), 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.outside = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in arguments if isinstance(tensor, Tensor)}
        result = function(*arguments, **named or {})
        if function._schema.name in PRODUCTS:
            self.products[sum(entry.operation == "send" and entry.bytes > SMALL for entry in self.group.trace.entries)] += 1
        if not self.memory:
            return result
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                known = storage._cdata in self.alive and not self.alive[storage._cdata][0].expired()
                if not known and storage._cdata not in before | self.outside:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if function._schema.name in PRODUCTS:
            self.most = max(self.most, self.bytes_alive())
        return result

    def bytes_alive(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(size for _, size in self.alive.values())


def watched(
    adapters: Any, ranks: int, lists: list[list[Action]], batches: list[Batch], cut: list[range], memory: bool = False, **sizes: Any
) -> list[tuple[Watch, Communicator, int, int]]:
    """One step on every rank: what was watched, the communicator with its trace, and the bytes of gradients and of all that is left."""

    def on_rank(group: Communicator, _: int) -> tuple[Watch, Communicator, int, int]:
        model = Model(cut[-1].stop, **sizes)
        pipeline = adapters.make_pipeline(model, cut, group, summed_loss)
        weights = dict(adapters.state(pipeline))
        group.trace.clear()
        with Watch(group, model, memory) as watch:
            watch.outside |= {weight.untyped_storage()._cdata for weight in weights.values()}
            adapters.step(pipeline, batches, lists)
        gradients = sum(weight.nbytes for weight in weights.values())
        if memory and watch.bytes_alive() > gradients + LEFT:
            gc.collect()  # what is only part of a circle of references goes
        return watch, group, gradients, watch.bytes_alive()

    [found] = on_pipelines(on_rank, ranks)
    return found


# Stage 7.


def apart_case() -> Case:
    """On the last rank, W comes after all that the rank before waits for."""
    lists, cut, matrices = [actions("F0 F1 I0 I1 W0 W1"), actions("F0 I0 F1 I1 W0 W1")], [range(1), range(1, 3)], 4
    given = {"ranks": 2, "blocks": 3, "cut": list(map(str, cut)), "schedule": in_words(lists)}
    names = "matrix products on rank 1 until the first gradient is sent", "those after the last one is sent", "in all"

    def observe(adapters: Any, **_: Any) -> Results:
        products = watched(adapters, 2, lists, even(2), cut)[1][0].products
        after = products[2]
        counts = budget(products[0], 2 * matrices + 3, "products"), budget(after, 2 * matrices + 2, "products", 2 * matrices)
        return dict(zip(names, (*counts, budget(products.total(), 6 * (matrices + 1), "products")), strict=True))

    expected = lambda **_: dict.fromkeys(names, WITHIN)  # noqa: E731
    return Case("budget", "weight gradients are computed in W", lambda: given, expected, TEXT.format(7), observe)


def large(microbatches: int) -> list[Batch]:
    return batches_of([(2, 8)] * microbatches, 0.0)


WIDE = {"width": 4, "inner": 48}
MESSAGE = 2 * 8 * WIDE["width"] * BYTES


def kept_case(title: str, schedule: str | list[str], stage: int, limits: tuple[int, int], microbatches: int) -> Case:
    """The most memory of a step, in micro-batches: measured against a step with one micro-batch."""
    ranks, cut = 2, cut_of(2, 2)
    lists = list(map(actions, schedule)) if isinstance(schedule, list) else schedule_of(schedule, ranks, microbatches)
    one = [[action for action in own if action.microbatch == 0] for own in lists]
    given = {"ranks": ranks, "micro-batches": microbatches, "schedule": in_words(lists)}
    about = "rank {}: the most bytes, gradients and messages apart"

    def observe(adapters: Any, **_: Any) -> Results:
        found: Results = {}
        runs = (one, large(1)), (lists, large(microbatches))
        single, whole = (watched(adapters, ranks, *run, cut, memory=True, **WIDE) for run in runs)
        for rank, limit in enumerate(limits):
            gradients = whole[rank][2]
            unit = single[rank][0].most
            most = max(0, whole[rank][0].most - gradients - 2 * microbatches * MESSAGE)
            said = WITHIN if most <= limit * unit else f"{most:,}: as much as {most / unit:.1f} micro-batches take, and {limit} may be kept"
            if stage == 7 and said != WITHIN:
                said += ". Detach what W keeps: x from ctx.saved_tensors still holds its graph; loop variables keep tensors alive too."
            found[about.format(rank)] = said
        return found

    expected = lambda **_: {about.format(rank): WITHIN for rank in range(ranks)}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(stage), observe)


# Stage 9.


def messages_case(title: str, ranks: int, schedule: str, chunks: int = 1, tied: bool = False) -> Case:
    batches, cut = batches_of([(2, 3), (1, 5), (3, 2), (1, 4)]), cut_of(5, ranks * chunks)
    lists = schedule_of(schedule, ranks, len(batches), chunks)
    given = {"ranks": ranks, "chunks": chunks, "micro-batches": [list(ids.shape) for ids, _ in batches], "schedule": in_words(lists)}
    given |= {"head.weight is embedding.weight": True} if tied else {}
    width = Model(0).embedding.embedding_dim
    shared = 2 * TOKENS * width * BYTES if tied else 0  # at the ends: sent and received

    def planned(rank: int, sends: bool) -> Counter:
        """The sizes of a rank's messages, with how many there are of each."""
        sizes: Counter = Counter()
        for action in lists[rank]:
            stage = action.chunk * ranks + rank
            neighbour = stage + (1 if (action.kind == "F") == sends else -1)
            if 0 <= neighbour < ranks * chunks:
                sizes[batches[action.microbatch][0].numel() * width * BYTES] += 1
        return sizes

    def observe(adapters: Any, **_: Any) -> Results:
        found: Results = {}
        for rank, (_, group, *_) in enumerate(watched(adapters, ranks, lists, batches, cut, tied=tied)):
            rest = 0
            for operation in ("send", "receive"):
                sizes = Counter(entry.bytes for entry in group.trace.entries if entry.operation == operation)
                plan = planned(rank, operation == "send")
                missing, more = plan - sizes, sizes - plan
                found[f"rank {rank}: planned {operation}s that were not made, by bytes"] = sorted(missing.elements())
                rest += sum(more.elements())
            rest += sum(entry.bytes for entry in group.trace.entries if entry.operation not in ("send", "receive"))
            found[f"rank {rank}: bytes of everything else"] = budget(rest, 64 + shared * (rank in (0, ranks - 1)), "bytes")
            calls = len(group.trace.entries) - planned(rank, True).total() - planned(rank, False).total()
            found[f"rank {rank}: other calls"] = budget(calls, 4, "calls")
        return found

    def expected(**_: Any) -> Results:
        found: Results = {}
        for rank in range(ranks):
            found |= {f"rank {rank}: planned {operation}s that were not made, by bytes": [] for operation in ("send", "receive")}
            found |= {f"rank {rank}: bytes of everything else": WITHIN, f"rank {rank}: other calls": WITHIN}
        return found

    return Case("budget", title, lambda: given, expected, TEXT.format(9), observe)


def products_case(ranks: int = 2, microbatches: int = 3, blocks: int = 4) -> Case:
    """Each matrix is multiplied three times for each micro-batch."""
    lists, cut = schedule_of("1f1b", ranks, microbatches), cut_of(blocks, ranks)
    given = {"ranks": ranks, "blocks": blocks, "micro-batches": microbatches, "schedule": in_words(lists)}
    about = "matrix products on rank {}"

    def observe(adapters: Any, **_: Any) -> Results:
        steps = watched(adapters, ranks, lists, even(microbatches), cut)
        limits = [3 * microbatches * (2 * len(cut[rank]) + (rank == ranks - 1)) for rank in range(ranks)]
        return {about.format(rank): budget(step[0].products.total(), limits[rank], "products") for rank, step in enumerate(steps)}

    expected = lambda **_: {about.format(rank): WITHIN for rank in range(ranks)}  # noqa: E731
    return Case("budget", "what is computed, once forward and twice backward", lambda: given, expected, TEXT.format(9), observe)


def left_case() -> Case:
    """After a step no activations are left, and no messages."""
    ranks, microbatches, cut, about = 2, 4, cut_of(2, 2), "rank {}: bytes that are left after the step, gradients apart"
    lists = schedule_of("1f1b", ranks, microbatches)
    given = {"ranks": ranks, "micro-batches": microbatches, "schedule": in_words(lists)}

    def observe(adapters: Any, **_: Any) -> Results:
        steps = watched(adapters, ranks, lists, large(microbatches), cut, memory=True, **WIDE)
        return {about.format(rank): budget(left - gradients, LEFT, "bytes") for rank, (_, _, gradients, left) in enumerate(steps)}

    expected = lambda **_: {about.format(rank): WITHIN for rank in range(ranks)}  # noqa: E731
    return Case("budget", "what is left after a step", lambda: given, expected, TEXT.format(9), observe)


SOON = ["F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4"]
SPLIT_BUDGETS = (
    apart_case(),
    kept_case("what W needed is freed after it", SOON, 7, (5, 1), 5),
)
BUDGETS = (
    messages_case("messages, and nothing else", 3, "1f1b"),
    messages_case("messages of several chunks", 2, "interleaved", chunks=2),
    messages_case("messages where the ends share a weight", 3, "1f1b", tied=True),
    products_case(),
    kept_case("what 1F1B keeps at a time", "1f1b", 9, (2, 1), 5),
    left_case(),
)
