"""Stage 12 of build 11: budgets of calls, of the model's input, and of bytes that are held."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.course.checking import Case

from .pieces import (
    SIZES,
    TEXT,
    WIDTH,
    WITHIN,
    Attention,
    Examples,
    Results,
    Table,
    budget,
    made,
    pairs_of,
    randn,
    settings_of,
)
from .running import marked, started
from .stepping import micro_batches_of


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Watch(TorchDispatchMode):
    """Watches the bytes of tensors that are made: those that are alive, and the most of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in([*arguments, *(named or {}).values()])}
        result = function(*arguments, **named or {})
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of the tensors that were made and still are."""
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        return sum(size for _, size in self.storages.values())


# How pairs are cut into micro-batches


def groups_case(title: str, examples: Examples, tokens: int, most: int) -> Case:
    """most: groups."""

    def observe(adapters: Any, **_: Any) -> Results:
        groups = [[int(number) for number in group] for group in adapters.micro_batches(examples, WIDTH, tokens)]
        model, sizes = made(Attention), []
        for group in groups:
            model.calls.clear()
            adapters.predictions(model, adapters.rows([examples[number] for number in group], WIDTH))
            sizes.append(max(call.ids.numel() for call in model.calls))
        found = {"numbers of the largest input": budget(max(sizes), tokens, "numbers"), "groups": budget(len(groups), most, "groups")}
        return found | {"each pair once": sorted(number for group in groups for number in group), "empty groups": groups.count([])}

    def expected(**_: Any) -> Results:
        found = {"numbers of the largest input": WITHIN, "groups": WITHIN}
        return found | {"each pair once": list(range(len(examples))), "empty groups": 0}

    given = {"tokens of each pair": [[len(ids) for ids, _ in pair] for pair in examples], "tokens": tokens, "width": WIDTH}
    return Case("budget", title, lambda: given, expected, TEXT.format(12), observe)


# What a batch and its log-probabilities cost


def input_case() -> Case:
    """Four short pairs: filled up to the longest, or in full rows of WIDTH, but not both."""
    examples = pairs_of([(2, 2, 1), (1, 3, 2), (2, 1, 1), (1, 2, 1)])
    longest = max(len(ids) for pair in examples for ids, _ in pair) - 1
    tokens = sum(len(ids) - 1 for pair in examples for ids, _ in pair)
    limit = max(2 * len(examples) * longest, WIDTH * -(-3 * tokens // (2 * WIDTH)))
    names = "calls", "numbers of the input"

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        adapters.log_probs(model, adapters.rows(examples, WIDTH))
        return dict(zip(names, (budget(len(model.calls), 1, "calls"), budget(model.calls[0].ids.numel(), limit, "numbers")), strict=True))

    given = {"tokens of each pair": [[len(ids) for ids, _ in pair] for pair in examples], "width": WIDTH}
    expected = lambda **_: dict.fromkeys(names, WITHIN)  # noqa: E731
    return Case("budget", "one call, and little that is filled up", lambda: given, expected, TEXT.format(12), observe)


WORDS = 500


def kept_case() -> Case:
    """24 pairs with a vocabulary of 500: bytes next to the logits, at the peak of the forward pass and after it."""
    examples = pairs_of([(3, 8, 8)] * 24, vocabulary=WORDS)
    row = WIDTH * WORDS * 8
    names = "bytes kept for the backward pass, without the logits", "bytes at the peak of the forward pass, without the logits"

    def observe(adapters: Any, **_: Any) -> Results:
        model = Table(randn(WORDS, WORDS, seed=2))
        batch = adapters.rows(examples, WIDTH)
        with Watch() as watch:
            found = adapters.log_probs(model, batch)
            kept = watch.alive()
        logits = model.calls[0].ids.numel() * WORDS * 8
        found.sum().backward()
        return dict(zip(names, (budget(kept - logits, row, "bytes"), budget(watch.most - logits, 4 * row, "bytes")), strict=True))

    given = {"pairs": len(examples), "vocabulary": WORDS, "width": WIDTH, "bytes of a row of logits": row}
    expected = lambda **_: dict.fromkeys(names, WITHIN)  # noqa: E731
    return Case("budget", "log-softmax is not kept", lambda: given, expected, TEXT.format(12), observe)


# What a step and a run cost


def graphs_case() -> Case:
    names = "logits of earlier micro-batches that are held", "bytes left after a step, without gradients and the optimizer's state"

    def observe(adapters: Any, **_: Any) -> Results:
        model, settings = made(Attention), settings_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        micro_batches = micro_batches_of([2, 3, 2, 1], settings)
        numbers = sum(weight.numel() for weight in model.parameters())
        count = len(list(model.parameters()))
        with Watch() as watch:
            adapters.step(model, optimizer, micro_batches, WIDTH, settings)
            left = watch.alive()
        noted = sum(call.ids.nbytes for call in model.calls)  # the model keeps its inputs
        held = max(call.alive for call in model.calls[-4:])
        rest = left - 3 * 8 * numbers - noted - 8 * count
        return dict(zip(names, (budget(held, 1, "tensors"), budget(rest, 512, "bytes")), strict=True))

    given = {"pairs of the micro-batches": [2, 3, 2, 1], "optimizer": "AdamW"}
    return Case("budget", "one graph at a time", lambda: given, lambda **_: dict.fromkeys(names, WITHIN), TEXT.format(12), observe)


def calls_case(title: str, settings: Results, before: int) -> Case:
    """Seven pairs in batches of 3 and micro-batches of 2: two epochs of 3 steps."""
    names = "calls before the first step", "calls of two epochs, and before"

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        run = started(adapters, model, torch.optim.SGD(model.parameters(), lr=0.01), marked(), settings=settings)
        first = len(model.calls)
        adapters.advance(run, 6)
        return dict(zip(names, (budget(first, before, "calls"), budget(len(model.calls), before + 2 * 5, "calls")), strict=True))

    given = {"pairs": 7, "batch_size": 3, "micro_size": 2, "steps": 6, **settings}
    return Case("budget", title, lambda: given, lambda **_: dict.fromkeys(names, WITHIN), TEXT.format(12), observe)


class Heavy(Attention):
    """Weights of 400,000 bytes."""

    def __init__(self) -> None:
        super().__init__(features=200)


def second_model_case() -> Case:
    about = "bytes that a run holds before its first step, without the model"

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Heavy)
        with Watch() as watch:
            run = started(adapters, model, torch.optim.SGD(model.parameters(), lr=0.01), marked())
            noted = sum(call.ids.nbytes for call in model.calls)
            held = watch.alive() - noted
        return {about: budget(held, 20_000, "bytes")} if run is not None else {}

    given = {"pairs": 7, "bytes of the model": sum(weight.nbytes for weight in made(Heavy).parameters())}
    return Case("budget", "no second model", lambda: given, lambda **_: {about: WITHIN}, TEXT.format(12), observe)


EVEN = [(3, 4, 4)] * 8  # six columns: two of them fill a row

BUDGETS = (
    groups_case("pairs of equal lengths", pairs_of(EVEN), 36, 3),
    groups_case("all in one", pairs_of(EVEN), 96, 1),
    groups_case("each alone", pairs_of(EVEN), 23, 8),
    groups_case("pairs of many lengths", pairs_of(SIZES), 48, 4),
    groups_case("the longest first", pairs_of([(5, 8, 8), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1)]), 24, 2),
    input_case(),
    kept_case(),
    graphs_case(),
    calls_case("the reference is scored once", settings_of(), 4),
    calls_case("without a reference", settings_of("orpo"), 0),
    second_model_case(),
)
