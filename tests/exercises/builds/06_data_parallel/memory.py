"""Build 06: what a rank of FSDP holds between two uses (stage 6), after a recomputed forward pass (8), and at the peak of a step (11)."""

from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import BYTES, TEXT, Model, Results, batches_of, make, on_groups, summed_loss
from .watching import WITHIN, Memory, Quiet, within

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


HELD = (held_case(2), held_case(3))
KEPT = (kept_case(),)
PEAKS = (
    peak_case("memory of FSDP", 2, 2),
    peak_case("memory of FSDP with recomputation, three ranks", 3, 1, recompute=True),
)
