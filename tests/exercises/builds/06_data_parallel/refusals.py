"""Build 06: what cannot be right is refused on every rank (stage 12)."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import TEXT, Model, Results, adamw, make, on_groups, several, summed_loss

Told = Callable[[str], bool]


def says(*words: str) -> Told:
    """Whether a sentence has all of these: names as they are, numbers as numbers."""
    return lambda text: all(
        word in re.findall(r"-?\d+", text) if word.lstrip("-").isdigit() else re.search(word, text, re.I) is not None for word in words
    )


def refusal_case(title: str, words: tuple[str, ...], attempt: Callable[[Any, Communicator], Any], ranks: int = 2, **given: Any) -> Case:
    """`attempt` returns what must be as before, or raises before it is called; it is called with the adapters on every rank."""
    wanted = f"ValueError that says {' and '.join(words) or 'why'}"
    told = says(*words)

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> str:
            before: Callable[[], dict[str, Tensor]] = dict
            try:
                before = attempt(adapters, group)
            except ValueError as error:
                return wanted if told(str(error)) else f"{type(error).__name__}, which does not say {' and '.join(words)}: {error}"
            return before if isinstance(before, str) else "accepted"

        [found] = on_groups(on_rank, ranks)
        return {f"rank {rank}": result for rank, result in enumerate(found)}

    expected = lambda **_: {f"rank {rank}": wanted for rank in range(ranks)}  # noqa: E731
    return Case("property", title, lambda: {"ranks": ranks, **given}, expected, TEXT.format(12), observe)


def unchanged_case(
    title: str, words: tuple[str, ...], kind: str, call: Callable[[Any, Any, Communicator], Any], prepare: bool = False
) -> Case:
    """A call on two ranks that is refused on both, after which the state is what it was. prepare: a step comes first."""
    wanted = f"ValueError that says {' and '.join(words) or 'why'}, and the state as it was"
    told = says(*words)

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> str:
            parallel = make(adapters, kind, Model(), group, adamw)
            if prepare:
                adapters.backward(parallel, several(2, (2, 2))[group.rank], summed_loss)
                adapters.update(parallel)
            before = adapters.state(parallel)
            try:
                call(adapters, parallel, group)
            except ValueError as error:
                said = str(error)
            else:
                return "accepted"
            if not told(said):
                return f"ValueError, which does not say {' and '.join(words)}: {said}"
            after = adapters.state(parallel)
            if set(after["optimizer"]) != set(before["optimizer"]):
                return "refused, and the optimizer's state has changed"
            pairs = [(after["model"][name], before["model"][name], name) for name in before["model"]]
            for name, entry in before["optimizer"].items():
                now = after["optimizer"][name]
                pairs += [(torch.as_tensor(now[key]), torch.as_tensor(v), f"{key} of {name}") for key, v in entry.items()]
            changed = [name for left, right, name in pairs if not torch.equal(left, right)]
            return f"refused, and changed: {changed[0]}" if changed else wanted

        [found] = on_groups(on_rank, 2)
        return {f"rank {rank}": result for rank, result in enumerate(found)}

    expected = lambda **_: {f"rank {rank}": wanted for rank in range(2)}  # noqa: E731
    return Case("property", title, lambda: {"kind": kind, "ranks": 2}, expected, TEXT.format(12), observe)


def made(kind: str, change: Callable[[Model, int], Any] = lambda model, rank: None, **options: Any) -> Callable[[Any, Communicator], Any]:
    def attempt(adapters: Any, group: Communicator) -> None:
        model = Model(**options)
        change(model, group.rank)
        make(adapters, kind, model, group)

    return attempt


def wider(model: Model, rank: int) -> None:
    if rank == 1:
        model.blocks[1].up = torch.nn.Linear(6, 11).double()


def frozen(model: Model, rank: int) -> None:
    model.blocks[0].down.bias.requires_grad = rank != 1


def longer(model: Model, rank: int) -> None:
    if rank == 1:
        model.tail = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


def no_module(adapters: Any, group: Communicator) -> None:
    adapters.make_sharded(Model(), ["blocks.0", "blocks.7"], group, adamw)


def bucket_bytes(value: int, kind: str) -> Callable[[Any, Communicator], Any]:
    return lambda adapters, group: make(adapters, kind, Model(), group, bucket_bytes=value) and None


def backward(change: Callable[[list, int], list], infinite: bool = False) -> Callable[[Any, Any, Communicator], Any]:
    def call(adapters: Any, parallel: Any, group: Communicator) -> None:
        adapters.backward(parallel, change(several(2, (2, 2))[group.rank], group.rank), summed_loss)

    return call


def ignored(batches: list, rank: int) -> list:
    return [(ids, torch.full_like(targets, -100)) for ids, targets in batches]


def other_shape(batches: list, rank: int) -> list:
    ids, targets = batches[1]
    return [batches[0], (ids, targets[:, :-1] if rank == 1 else targets)]


def infinite(value: float) -> Callable[[Any, Any, Communicator], Any]:
    def call(adapters: Any, parallel: Any, group: Communicator) -> None:
        factor = value if group.rank == 1 else 1.0
        adapters.backward(parallel, several(2, (2, 2))[group.rank], lambda logits, targets: factor * summed_loss(logits, targets))
        adapters.update(parallel)

    return call


def loaded(change: Callable[[dict], None]) -> Callable[[Any, Any, Communicator], Any]:
    def call(adapters: Any, parallel: Any, group: Communicator) -> None:
        model = {name: weight.detach() + 1 for name, weight in Model().named_parameters()}
        change(model)
        adapters.load(parallel, {"model": model, "optimizer": {}})

    return call


def transposed(model: dict[str, Tensor]) -> None:
    model["head.weight"] = model["head.weight"].T


BAD_INPUT = (
    refusal_case("no room in a bucket", ("0",), bucket_bytes(0, "replica"), bucket_bytes=0),
    refusal_case("less than no room", ("-5",), bucket_bytes(-5, "zero"), bucket_bytes=-5),
    refusal_case("another shape on rank 1", (r"blocks\.1\.up\.weight",), made("replica", wider)),
    refusal_case("another shape on one rank of three, FSDP", (r"blocks\.1\.up\.weight",), made("sharded", wider), ranks=3),
    refusal_case("frozen on one rank alone", (r"blocks\.0\.down\.bias",), made("zero", frozen)),
    refusal_case("one weight more on rank 1", ("tail",), made("replica", longer)),
    refusal_case("a unit that is no module", (r"blocks\.7",), no_module),
    unchanged_case("no target counts on any rank", (), "replica", backward(ignored), prepare=True),
    unchanged_case("no target counts on any rank, FSDP", (), "sharded", backward(ignored), prepare=True),
    unchanged_case("no micro-batches on any rank", (), "zero", backward(lambda batches, rank: []), prepare=True),
    unchanged_case("targets of another shape than the ids on rank 1 alone", ("1",), "replica", backward(other_shape)),
    unchanged_case("targets of another shape, FSDP", ("1",), "sharded", backward(other_shape), prepare=True),
    unchanged_case("unequally many micro-batches with FSDP", ("1", "2"), "sharded", backward(lambda batches, rank: batches[rank:])),
    unchanged_case("an infinite gradient on rank 1, DDP", ("inf|nan",), "replica", infinite(float("inf"))),
    unchanged_case("a gradient that is no number on rank 1, ZeRO-1", ("nan",), "zero", infinite(float("nan")), prepare=True),
    unchanged_case("an infinite gradient on rank 1, FSDP", ("inf|nan",), "sharded", infinite(float("inf")), prepare=True),
    unchanged_case("a weight is missing in a state", (r"blocks\.0\.long",), "sharded", loaded(lambda m: m.pop("blocks.0.long"))),
    unchanged_case("an unknown weight in a state", ("extra",), "replica", loaded(lambda m: m.update(extra=torch.ones(1))), prepare=True),
    unchanged_case("a weight of another shape in a state", (r"head\.weight",), "zero", loaded(transposed)),
)
