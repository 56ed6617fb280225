"""The cases of build 08: the adapters of a pipeline against the same model in one process.

Ranks are threads. Every stage climbs from the smallest case on which a mistake shows to the others.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.checking import Case
from shared.course.comparing import Said
from shared.parallel.comm.communicator import Communicator

from .limits import BUDGETS, SPLIT_BUDGETS
from .pieces import (
    NEAR,
    ONE_PROCESS,
    WIDTH,
    Batch,
    Digits,
    Model,
    Results,
    Whole,
    batches_of,
    cut_of,
    digit_loss,
    even,
    in_words,
    names_on,
    on_pipelines,
    schedule_of,
    summed_loss,
    uneven,
)
from .refusals import BAD_INPUT, REFUSED

BLOCKS = 5

# Stage 1: cut.


class Made(TorchDispatchMode):
    """The memory of new tensors."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes_alive(self, but: set[int]) -> int:
        return sum(size for key, (storage, size) in self.storages.items() if key not in but and not storage.expired())


def observe_cut(adapters: Any, blocks: int, ranks: int, cut: list[range], tied: bool) -> Results:
    """What of each rank's weights is not as it must be; every list is empty where all is well."""
    whole = Model(blocks, tied)
    given = dict(whole.named_parameters())

    def on_rank(group: Communicator, _: int) -> tuple[dict[str, Tensor], list[str], int]:
        model = Model(blocks, tied)
        alive = {name: weakref.ref(weight) for name, weight in model.named_parameters()}
        with Made() as made:
            pipeline = adapters.make_pipeline(model, cut, group, summed_loss)
        del model
        held = dict(adapters.state(pipeline))
        if any(weight() is not None for name, weight in alive.items() if name not in held):
            gc.collect()  # what is only part of a circle of references goes
        kept = [name for name, weight in alive.items() if weight() is not None and name not in held]
        # Weights may be copies; then what was given is no more than these.
        copies = made.bytes_alive({weight.untyped_storage()._cdata for weight in held.values()})
        originals = {name: alive[name]() for name in held if name in alive}
        given_too = [held[name] for name, own in originals.items() if own is not None and own.data_ptr() != held[name].data_ptr()]
        return held, kept, copies + sum(weight.nbytes for weight in given_too)

    [found] = on_pipelines(on_rank, ranks)
    problems: dict[str, list[str]] = {about: [] for about in NO_PROBLEMS}
    for rank, (held, kept, more) in enumerate(found):
        wanted = names_on(whole, cut, rank, ranks, tied)
        problems["missing"] += [f"{name} on rank {rank}" for name in wanted if name not in held]
        problems["held on a rank that does not need them"] += [f"{name} on rank {rank}" for name in held if name not in wanted]
        wrong = [name for name in wanted if name in held and not torch.equal(held[name].detach(), given[name].detach())]
        problems["not the model's numbers"] += [f"{name} on rank {rank}" for name in wrong]
        problems["still in memory, though not of this rank's stages"] += [f"{name} on rank {rank}" for name in kept]
        problems["held twice"] += [f"{more} bytes on rank {rank}"] if more > SMALL else []
    return {about: names[:3] for about, names in problems.items()}


SMALL = 64  # bytes of what a pipeline may make for itself when it is made
NO_PROBLEMS: dict[str, list[str]] = {
    "missing": [], "held on a rank that does not need them": [], "not the model's numbers": [],
    "still in memory, though not of this rank's stages": [], "held twice": [],
}  # fmt: skip


def cut_case(title: str, ranks: int, blocks: int, chunks: int = 1, tied: bool = False) -> Case:
    cut = cut_of(blocks, ranks * chunks)
    given = {"ranks": ranks, "cut": list(map(str, cut)), "head.weight is embedding.weight": tied}
    observe = lambda adapters, **_: observe_cut(adapters, blocks, ranks, cut, tied)  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: NO_PROBLEMS, "the model's weights, compared bit for bit", observe)


# Stage 2: forward.


def losses_case(
    title: str, ranks: int, make: Callable[..., list[Batch]], microbatches: int, pipelines: int = 1, training: bool = False
) -> Case:
    cut = cut_of(BLOCKS, ranks)
    everything = [make(microbatches, seed=number) for number in range(pipelines)]
    shapes = [list(ids.shape) for ids, _ in everything[0]]
    given = {"ranks": ranks, "cut": list(map(str, cut)), "model.training": training, "micro-batches": shapes}
    given |= {"pipelines in the world": pipelines} if pipelines > 1 else {}

    def named(number: int, ranks_losses: list[list[Tensor]]) -> Results:
        about = f" of pipeline {number}" if pipelines > 1 else ""
        found: Results = {f"losses on rank {rank}{about}": list(losses) for rank, losses in enumerate(ranks_losses[:-1])}
        return found | {f"loss of micro-batch {i}{about}": loss for i, loss in enumerate(ranks_losses[-1])}

    def expected(**_: Any) -> Results:
        found: Results = {}
        for number, batches in enumerate(everything):
            found |= named(number, [[]] * (ranks - 1) + [Whole(Model(BLOCKS), batches, training).losses])
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, number: int) -> list[Tensor]:
            pipeline = adapters.make_pipeline(Model(BLOCKS).train(training), cut, group, summed_loss)
            return [loss.detach() for loss in adapters.losses(pipeline, everything[number])]

        found: Results = {}
        for number, losses in enumerate(on_pipelines(on_rank, ranks, pipelines)):
            found |= named(number, losses)
        return found

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


# Stages 3 to 8: whole steps.


def step_case(
    title: str, ranks: int, schedule: str | int, batches: list[Batch], chunks: int = 1, what: str = "gradients", blocks: int = BLOCKS,
    pipelines: int = 1, tied: bool = False, twice: bool = False, **options: bool,
) -> Case:  # fmt: skip
    """what: gradients (and the last stage's loss), or loss and gradient norm on every rank. schedule: a name, or the seed of one by
    chance. twice: after a step with other tokens."""
    cut, lists = cut_of(blocks, ranks * chunks), schedule_of(schedule, ranks, len(batches), chunks, **options)
    shapes = [list(ids.shape) for ids, _ in batches]
    given = {"ranks": ranks, "chunks": chunks, "cut": list(map(str, cut)), "micro-batches": shapes, "schedule": in_words(lists)}
    given |= {"pipelines in the world": pipelines} if pipelines > 1 else {}
    given |= {"head.weight is embedding.weight": True} if tied else {}
    of = lambda number: f" of pipeline {number}" if pipelines > 1 else ""  # noqa: E731

    def expected(**_: Any) -> Results:
        model = Model(blocks, tied)
        found: Results = {}
        for number in range(pipelines):
            whole = Whole(model, batches[number:] + batches[:number])
            if what == "totals":
                for rank in range(ranks):
                    found |= {f"loss on rank {rank}": whole.mean, f"norm on rank {rank}": whole.norm}
                continue
            found[f"loss on rank {ranks - 1}{of(number)}"] = whole.mean
            for rank in range(ranks):
                for name in names_on(model, cut, rank, ranks, tied):
                    found[f"gradient of {name} on rank {rank}{of(number)}"] = whole.gradients[name]
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, number: int) -> Results:
            pipeline = adapters.make_pipeline(Model(blocks, tied), cut, group, summed_loss)
            if twice:
                adapters.step(pipeline, [(ids.flip(0), targets) for ids, targets in batches], lists)
            own = batches[number:] + batches[:number]  # another order in another pipeline: so its own schedule's micro-batches differ
            loss = adapters.step(pipeline, own, lists)
            if what == "totals":
                norm = adapters.gradient_norm(pipeline)
                return {f"loss on rank {group.rank}": loss.detach(), f"norm on rank {group.rank}": norm.detach()}
            found: Results = {f"loss on rank {group.rank}{of(number)}": loss.detach()} if group.rank == ranks - 1 else {}
            for name, gradient in dict(adapters.gradients(pipeline)).items():
                value = gradient.detach().clone() if isinstance(gradient, Tensor) else Said("no gradient")
                found[f"gradient of {name} on rank {group.rank}{of(number)}"] = value
            return found

        return {name: value for results in on_pipelines(on_rank, ranks, pipelines) for found in results for name, value in found.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def digits_case(title: str, ranks: int, schedule: str | int, microbatches: int, chunks: int = 1, **options: bool) -> Case:
    """Micro-batch i has one token and adds 10^i to each gradient, so that the gradient's digits say how often each was counted."""
    blocks = 2 * ranks * chunks
    cut, lists = cut_of(blocks, ranks * chunks), schedule_of(schedule, ranks, microbatches, chunks, **options)
    given = {"ranks": ranks, "chunks": chunks, "micro-batches": microbatches, "schedule": in_words(lists)}
    about = "how often each micro-batch is in the gradient of {}"

    def observe(adapters: Any, **_: Any) -> Results:
        batches = [(torch.tensor([[0]]), torch.tensor([[10**number]])) for number in range(microbatches)]

        def on_rank(group: Communicator, _: int) -> Results:
            pipeline = adapters.make_pipeline(Digits(blocks), cut, group, digit_loss)
            adapters.step(pipeline, batches, lists)
            return {about.format(name): digits(gradient, microbatches) for name, gradient in dict(adapters.gradients(pipeline)).items()}

        [results] = on_pipelines(on_rank, ranks)
        return {name: value for found in results for name, value in found.items()}

    def expected(**_: Any) -> Results:
        return {about.format(name): [1] * microbatches for name, _ in Digits(blocks).named_parameters()}

    return Case("worked example", title, lambda: given, expected, "each micro-batch counts once, and the sum is divided once", observe)


def digits(gradient: Tensor | None, microbatches: int) -> list[int] | Said:
    """The gradient times the tokens, one of each micro-batch, digit by digit from micro-batch 0 on."""
    value = 0.0 if gradient is None else gradient.sum().item() * microbatches
    if abs(value - round(value)) > 1e-6 or not 0 <= value < 10**microbatches:
        return Said(f"{value:.6g}, times the tokens: not a sum of whole micro-batches")
    return [int(digit) for digit in reversed(f"{round(value):0{microbatches}d}")]


ONE, EVEN, UNEVEN = batches_of([(2, 3)], 0.0), even(4), uneven(5)
CASES = {
    "cut": (
        cut_case("two ranks, three blocks", 2, 3),
        cut_case("four ranks, seven blocks", 4, 7),
        cut_case("two chunks on each of two ranks", 2, 5, chunks=2),
    ),
    "forward": (
        losses_case("one micro-batch", 2, even, 1),
        losses_case("three micro-batches, in their order", 2, even, 3),
        losses_case("a model in training mode stays in it", 2, even, 2, training=True),
        losses_case("micro-batches of several shapes, four ranks", 4, uneven, 5),
        losses_case("two pipelines side by side, each with ranks of its own", 2, even, 2, pipelines=2),
    ),
    "backward": (
        step_case("every gradient of one micro-batch", 2, "gpipe", ONE),
        digits_case("each micro-batch counts once, GPipe", 2, "gpipe", 3),
        step_case("every gradient of a GPipe step of four micro-batches", 2, "gpipe", EVEN),
        step_case("four ranks", 4, "gpipe", EVEN),
        step_case("a second step has gradients of its own", 2, "gpipe", EVEN, twice=True),
    ),
    "schedule": (
        digits_case("each micro-batch counts once, 1F1B", 2, "1f1b", 5),
        step_case("1F1B on two ranks", 2, "1f1b", EVEN),
        step_case("1F1B, micro-batches of several shapes, and numbers of tokens that count", 2, "1f1b", UNEVEN),
        step_case("GPipe on four ranks, uneven", 4, "gpipe", UNEVEN),
        digits_case("an order by chance", 2, 1, 5),
        *(step_case(f"an order by chance on {ranks} ranks", ranks, seed, UNEVEN) for seed, ranks in enumerate((2, 2, 3, 4))),
        step_case("1F1B with fewer micro-batches than ranks", 4, "1f1b", EVEN[:2]),
        step_case("two pipelines side by side", 2, "1f1b", EVEN, pipelines=2),
    ),
    "chunks": (
        digits_case("each micro-batch counts once, interleaved", 2, "interleaved", 4, chunks=2),
        step_case("interleaved on two ranks, two chunks each", 2, "interleaved", EVEN, chunks=2),
        step_case("interleaved on three ranks, two chunks each, several shapes", 3, "interleaved", uneven(6), chunks=2, blocks=7),
        digits_case("one chunk, where one rank's order is not the other's", 2, 3, 5, same_order=False),
        *(
            step_case(f"an order by chance, {ranks} ranks, {chunks} chunks", ranks, seed, UNEVEN, chunks, blocks=7, same_order=seed < 2)
            for seed, (ranks, chunks) in enumerate(((2, 2), (2, 3), (2, 2), (3, 2), (2, 3)))
        ),
    ),
    "refuse": REFUSED,
    "split": (
        digits_case("each micro-batch counts once, zero bubble", 2, "zero_bubble", 5),
        step_case("zero bubble on two ranks", 2, "zero_bubble", UNEVEN),
        step_case("zero bubble on four ranks", 4, "zero_bubble", EVEN),
        *SPLIT_BUDGETS,
        *(
            step_case(f"B, or I and W, in an order by chance, chunks: {chunks}", 2, seed, UNEVEN, chunks, same_order=False, split=True)
            for seed, chunks in enumerate((1, 2))
        ),
    ),
    "ends": (
        cut_case("the weight that both ends hold", 3, 5, tied=True),
        step_case("both ends have the sum of its gradients", 2, "1f1b", UNEVEN, tied=True),
        step_case("three ranks", 3, "1f1b", UNEVEN, tied=True),
        step_case("after another step", 3, "gpipe", EVEN, tied=True, twice=True),
        step_case("loss and gradient norm on every rank", 3, "1f1b", UNEVEN, what="totals"),
        step_case("the shared weight counts once in the norm", 3, "1f1b", UNEVEN, what="totals", tied=True),
    ),
    "budgets": BUDGETS,
    "bad_input": BAD_INPUT,
}
