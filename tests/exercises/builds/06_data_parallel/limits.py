"""Build 06: buckets that travel while the backward pass computes (stage 3), and traffic (stage 11)."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import BYTES, TEXT, Batch, Model, Results, adamw, batches_of, described, make, on_groups, several, summed_loss
from .watching import WITHIN, large, within

WIDE = {"width": 16, "inner": 24}  # so that each bucket is larger than all counts and flags together
SPARE = tuple(f"blocks.{number}.spare" for number in range(4))


def small(model: Model) -> int:
    """Bytes that a step may send beside gradients and weights."""
    return 256 + 8 * len(list(model.named_parameters()))


# Stage 3.


def buckets_of(model: Model, bucket_bytes: int) -> list[list[str]]:
    buckets: list[list[str]] = []
    sizes = {name: weight.nbytes for name, weight in model.named_parameters() if weight.requires_grad}
    for name in reversed(sizes):
        if not buckets or sum(sizes[each] for each in buckets[-1]) + sizes[name] > bucket_bytes:
            buckets.append([])
        buckets[-1].append(name)
    return buckets


def bytes_of(model: Model, bucket: list[str]) -> int:
    return sum(model.get_parameter(name).nbytes for name in bucket)


def sizes_case(title: str, bucket_bytes: int, numbers: Sequence[int] = (1, 1), stage: int = 3) -> Case:
    """The sums of a step, in their order, by bytes."""
    batches = several(len(numbers), numbers)
    given = {"kind": "replica", "micro-batches": described(batches), "bucket_bytes": bucket_bytes}
    about = "bytes of the buckets that rank {} sums, in order"

    def expected(**_: Any) -> Results:
        model = Model(**WIDE)
        sizes = [size for bucket in buckets_of(model, bucket_bytes) if (size := bytes_of(model, bucket)) > small(model)]
        return {about.format(rank): sizes for rank in range(len(numbers))}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> list[int]:
            model = Model(**WIDE)
            parallel = make(adapters, "replica", model, group, bucket_bytes=bucket_bytes)
            group.trace.clear()
            adapters.backward(parallel, batches[group.rank], summed_loss)
            return [entry.bytes for entry in large(group, small(model))]

        [results] = on_groups(on_rank, len(numbers))
        return {about.format(rank): sizes for rank, sizes in enumerate(results)}

    return Case("budget", title, lambda: given, expected, TEXT.format(stage), observe)


def overlap_case(
    title: str, bucket_bytes: int, batches: list[list[Batch]], kind: str = "replica", blocks: int = 3, backwards: bool = False
) -> Case:
    """How many buckets have started, and been waited for, whenever the gradient of a block's output is complete."""
    options = {"blocks": blocks, "frozen": SPARE[:blocks], "backwards": backwards, **WIDE}
    given = {"kind": kind, "micro-batches": described(batches), "bucket_bytes": bucket_bytes, "blocks": blocks}
    given |= {"order of the blocks": "from the last to the first where the first id is odd"} if backwards else {}
    about = "buckets that rank {} has started when the gradient of block {}'s output is there, micro-batch {}", "of these, waited for"

    def walk(ids: torch.Tensor) -> list[int]:
        """The blocks in the order of the backward pass."""
        return list(range(blocks)) if backwards and ids[0, 0] % 2 else list(reversed(range(blocks)))

    def named(rank: int, found: list[tuple[int, int]]) -> Results:
        results, places = {}, iter(found)
        for number, (ids, _) in enumerate(batches[rank]):
            for block in walk(ids):
                name = about[0].format(rank, block, number)
                started, waited = next(places, ("none", "none"))
                results |= {name: started, f"{name}: {about[1]}": waited}
        return results

    def expected(**_: Any) -> Results:
        model, found = Model(**options), {}
        for rank, own in enumerate(batches):
            notes = []
            for number, (ids, _) in enumerate(own):
                done = ["norm.", "head."]
                for block in walk(ids):
                    unused = [".long"] * (ids.shape[1] <= 3) + ["far"] * (ids.shape[1] <= 4) + ["nothing"]
                    complete = lambda name: name.startswith(tuple(done)) and not name.endswith(tuple(unused))  # noqa: B023, E731
                    full = list(takewhile(lambda bucket: all(map(complete, bucket)), buckets_of(model, bucket_bytes)))  # noqa: B023
                    last = number == len(own) - 1
                    notes.append((sum(bytes_of(model, bucket) > small(model) for bucket in full) if last else 0, 0))
                    done.append(f"blocks.{block}.")
            found |= named(rank, notes)
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> list[tuple[int, int]]:
            model = Model(**options)
            parallel = make(adapters, kind, model, group, bucket_bytes=bucket_bytes)
            group.trace.clear()

            def note() -> tuple[int, int]:
                sums = large(group, small(model))
                return len(sums), sum(entry.end is not None for entry in sums)

            model.note = note
            adapters.backward(parallel, batches[group.rank], summed_loss)
            return model.notes

        found: Results = {}
        [results] = on_groups(on_rank, len(batches))
        for rank, notes in enumerate(results):
            found |= named(rank, notes)
        return found

    return Case("budget", title, lambda: given, expected, TEXT.format(3), observe)


# Stage 11: traffic.


def traffic_case(title: str, kind: str, numbers: Sequence[int], bucket_bytes: int = 4000) -> Case:
    """Bytes and calls of a step by operation, those of counts and flags apart."""
    ranks, batches = len(numbers), several(len(numbers), numbers)
    given = {"kind": kind, "micro-batches": described(batches), "bucket_bytes": bucket_bytes}
    about = "rank {}: {}"

    def limits(model: Model) -> dict[str, tuple[int, int]]:
        """Operation -> calls and bytes that are planned."""
        trained = {name: weight.nbytes for name, weight in model.named_parameters()}
        buckets = len(buckets_of(model, bucket_bytes))
        if kind == "replica":
            return {"all_reduce": (buckets, sum(trained.values()))}
        if kind == "zero":
            return {"reduce_scatter": (buckets, sum(trained.values())), "all_gather": (buckets, sum(trained.values()))}
        inside = sum(size for name, size in trained.items() if name.startswith("blocks."))
        outside = [size for name, size in trained.items() if not name.startswith("blocks.")]
        times, units = numbers[0], len(model.blocks)
        planned = {"all_gather": (2 * times * units, 2 * times * inside), "reduce_scatter": (times * units, times * inside)}
        return planned | {"all_reduce": (len(outside), sum(outside))}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> Results:
            model = Model(**WIDE)
            limit, flags = limits(model), small(model)
            padding = BYTES * ranks * (len(buckets_of(model, bucket_bytes)) + 2 * len(model.blocks)) * max(numbers)
            parallel = make(adapters, kind, model, group, adamw, bucket_bytes)
            group.trace.clear()
            adapters.backward(parallel, batches[group.rank], summed_loss)
            adapters.update(parallel)
            calls, sent = Counter(), Counter()
            for entry in group.trace.entries:
                calls[entry.operation] += 1
                sent[entry.operation] += entry.bytes
            found: Results = {}
            for operation, (planned, size) in limit.items():
                more = within(sent[operation], size + padding + flags)
                found[f"{operation}s, bytes"] = more if sent[operation] >= size * (operation != "all_reduce") else "less than the weights"
                found[f"{operation}s, calls"] = within(calls[operation], planned + 8, "calls")
            found["other operations, calls"] = within(sum(n for name, n in calls.items() if name not in limit), 8, "calls")
            found["other operations, bytes"] = within(sum(n for name, n in sent.items() if name not in limit), flags)
            return {about.format(group.rank, name): value for name, value in found.items()}

        [results] = on_groups(on_rank, ranks)
        return {name: value for found in results for name, value in found.items()}

    def expected(**_: Any) -> Results:
        names = [f"{operation}s, {what}" for operation in limits(Model(**WIDE)) for what in ("bytes", "calls")]
        names += ["other operations, calls", "other operations, bytes"]
        return {about.format(rank, name): WITHIN for rank in range(ranks) for name in names}

    return Case("budget", title, lambda: given, expected, TEXT.format(11), observe)


LONG = [batches_of([(2, 5), (2, 5)][: 1 + rank], rank, 0.1, first=0) for rank in range(2)]
ONE_LONG = [own[-1:] for own in LONG]
MIXED = [batches_of([(2, 5)], 0, 0.1, first=0), batches_of([(2, 3)], 1, 0.1, first=0)]
ORDERS = [batches_of([(2, 5)], rank, 0.1, first=rank) for rank in range(2)]
BUCKETS = (
    sizes_case("the buckets, in order", 4000),
    sizes_case("weights larger than bucket_bytes", 1200),
    sizes_case("one bucket", 10**6),
    overlap_case("buckets start while the backward pass computes", 4000, ONE_LONG),
    overlap_case("smaller buckets", 2500, ONE_LONG),
    overlap_case("a rank that does not use some weights", 4000, MIXED),
    overlap_case("ranks whose blocks run in different orders", 4000, ORDERS, blocks=2, backwards=True),
)
IN_THE_LAST = (overlap_case("buckets start in the last micro-batch, which the ranks may have at different times", 4000, LONG),)
BUDGETS = (
    sizes_case("one exchange for several micro-batches", 4000, (3, 1), stage=11),
    traffic_case("what DDP sends", "replica", (2, 3)),
    traffic_case("what ZeRO-1 sends", "zero", (2, 3)),
    overlap_case("ZeRO-1's buckets start in the backward pass too", 4000, LONG, kind="zero"),
    traffic_case("what FSDP sends", "sharded", (3, 3)),
    traffic_case("what FSDP sends with recomputation", "recompute", (1, 1)),
)
