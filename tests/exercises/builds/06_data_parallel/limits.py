"""Build 06: buckets that travel while the backward pass computes (stage 3), memory (stages 6, 8 and 11) and traffic (stage 11)."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import BYTES, TEXT, Batch, Model, Results, adamw, batches_of, described, make, on_groups, several, summed_loss
from .watching import WITHIN, Memory, Quiet, large, within

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


# Stages 6, 8 and 11: memory.

HEAVY = {"blocks": 5, "width": 16, "inner": 40}
TINY = [batches_of([(1, 2)] * 2, seed, 0.0) for seed in range(3)]
SLACK = 2048


def sizes(ranks: int) -> tuple[int, int, int]:
    """Bytes of one unit, of a rank's shares of all units, and of the weights outside, of a HEAVY model."""
    model = Model(**HEAVY)
    unit = sum(weight.nbytes for weight in model.blocks[0].parameters())
    outside = sum(weight.nbytes for weight in model.parameters()) - unit * HEAVY["blocks"]
    return unit, unit * HEAVY["blocks"] // ranks, outside


def held_case(ranks: int) -> Case:
    given = {"ranks": ranks, "units": HEAVY["blocks"], "bytes of a unit": sizes(ranks)[0], "bytes outside of units": sizes(ranks)[2]}
    names = "bytes on rank {} after make_sharded", "after a forward pass without gradients", "after a forward pass with gradients"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> list[str]:
            model, found = Model(**HEAVY), []
            _, share, outside = sizes(ranks)
            with Memory(model) as memory:
                parallel = make(adapters, "sharded", model, Quiet(group, memory), no_state)
                found.append(memory.left(share + 2 * outside + SLACK))
                with torch.no_grad():
                    adapters.forward(parallel, TINY[group.rank][0][0])
                found.append(memory.left(share + 2 * outside + SLACK))
                logits = adapters.forward(parallel, TINY[group.rank][0][0])
                found.append(memory.left(share + 2 * outside + 4 * HEAVY["blocks"] * SLACK))
                del logits
            return found

        [results] = on_groups(on_rank, ranks)
        by_name = [dict(zip(names, found, strict=True)) for found in results]
        return {f"rank {rank}: {name.format(rank)}": value for rank, found in enumerate(by_name) for name, value in found.items()}

    expected = lambda **_: {f"rank {rank}: {name.format(rank)}": WITHIN for rank in range(ranks) for name in names}  # noqa: E731
    return Case("budget", "what is held between two uses", lambda: given, expected, TEXT.format(6), observe)


def no_state(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors or [torch.zeros(0)], lr=0.1)


def peak_case(title: str, ranks: int, microbatches: int, recompute: bool = False) -> Case:
    """The most bytes of a forward pass, of a step, and those after it, in units."""
    unit, share, outside = sizes(ranks)
    given = {"ranks": ranks, "units": HEAVY["blocks"], "micro-batches": microbatches, "recompute": recompute, "bytes of a unit": unit}
    names = "in a forward pass", "in a step", "after a step"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> list[str]:
            model, found = Model(**HEAVY), []
            with Memory(model) as memory:
                parallel = make(adapters, "recompute" if recompute else "sharded", model, Quiet(group, memory), no_state)
                own = TINY[group.rank][:microbatches]
                memory.most = before = memory.alive()
                with torch.no_grad():
                    adapters.forward(parallel, own[0][0])
                found.append(within(memory.most - before, unit + unit // 4 + 3 * SLACK))
                memory.most = memory.alive()
                adapters.backward(parallel, own, summed_loss)
                gradients = share + 2 * outside
                found.append(within(memory.most - before, 3 * unit + gradients + 10 * SLACK))
                adapters.update(parallel)
                found.append(memory.left(gradients + SLACK, before))
            return found

        [results] = on_groups(on_rank, ranks)
        by_name = [dict(zip(names, found, strict=True)) for found in results]
        return {f"rank {rank}: most bytes {name}": value for rank, found in enumerate(by_name) for name, value in found.items()}

    expected = lambda **_: {f"rank {rank}: most bytes {name}": WITHIN for rank in range(ranks) for name in names}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(11), observe)


def kept_case(ranks: int = 2, blocks: int = 4) -> Case:
    """What a forward pass with gradients keeps, with recomputed units: their inputs, and what is outside of them."""
    options = {"blocks": blocks, "width": 4, "inner": 64}
    batches = [batches_of([(4, 8)], seed, 0.0) for seed in range(ranks)]
    given = {"ranks": ranks, "recompute": True, "units": blocks, "ids": [4, 8], "width": 4, "inner width": 64}
    about, one = "rank {}: bytes that a forward pass keeps", 4 * 8 * 4 * BYTES

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> str:
            model = Model(**options)
            with Memory(model) as memory:
                parallel = make(adapters, "recompute", model, Quiet(group, memory), no_state)
                before = memory.alive()
                logits = adapters.forward(parallel, batches[group.rank][0][0])
                kept = memory.left(2 * blocks * one + 12 * one, before)
                del logits
            return kept

        [results] = on_groups(on_rank, ranks)
        return {about.format(rank): value for rank, value in enumerate(results)}

    expected = lambda **_: {about.format(rank): WITHIN for rank in range(ranks)}  # noqa: E731
    return Case("budget", "what a forward pass keeps", lambda: given, expected, TEXT.format(8), observe)


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
HELD = (held_case(2), held_case(3))
KEPT = (kept_case(),)
BUDGETS = (
    sizes_case("one exchange for several micro-batches", 4000, (3, 1), stage=11),
    traffic_case("what DDP sends", "replica", (2, 3)),
    traffic_case("what ZeRO-1 sends", "zero", (2, 3)),
    overlap_case("ZeRO-1's buckets start in the backward pass too", 4000, LONG, kind="zero"),
    traffic_case("what FSDP sends", "sharded", (3, 3)),
    traffic_case("what FSDP sends with recomputation", "recompute", (1, 1)),
    peak_case("memory of FSDP", 2, 2),
    peak_case("memory of FSDP with recomputation, three ranks", 3, 1, recompute=True),
)
