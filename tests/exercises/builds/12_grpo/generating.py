"""Stages 1, 2 and 5 of build 12: a KV cache, greedy answers in one batch, and a fixed number of rows that are filled again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.course.checking import Case

from .pieces import (
    ALONE,
    PROMPTS,
    ROOM,
    VOCABULARY,
    WITHIN,
    Attention,
    Prompts,
    Recorded,
    Results,
    Rotary,
    Table,
    budget,
    case,
    likeliest,
    made,
    next_logits,
    randn,
)

# Stage 1: cache

NEXT = [[2, 4, 6, 8, 1], [0, 9, 9, 3, 7], [1, 1, 0, 5, 10], [8, 2, 6, 3, 3], [4, 10, 7, 7, 0]]  # tokens after each of PROMPTS


def cache_case(
    title: str, kind: Callable[[], Recorded], rows: list[int], places: int, steps: int, dtype: Any = None, **more: Any
) -> Case:
    """rows: of PROMPTS and NEXT. The logits after the prompts, and after each further token."""
    prompts, following = [PROMPTS[row] for row in rows], [NEXT[row] for row in rows]
    model_of = lambda: made(kind).to(dtype or torch.float64)  # noqa: E731

    def expected() -> Results:
        model, found = model_of(), {}
        for step in range(steps + 1):
            found[f"logits after {step} more"] = torch.stack([next_logits(model, p + n[:step]) for p, n in zip(prompts, following)])
        return found

    def observe(adapters: Any) -> Results:
        model = model_of()
        cache, logits = adapters.prefill(model, [list(prompt) for prompt in prompts], places)
        found = {"logits after 0 more": logits.clone()}
        for step in range(steps):
            found[f"logits after {step + 1} more"] = adapters.append(model, cache, torch.tensor([each[step] for each in following])).clone()
        return found

    given = {"model": kind.__name__, "prompts": prompts, "places": places, "tokens after them": [each[:steps] for each in following]}
    return case(title, given, expected, observe, ALONE, **more)


def two_caches_case() -> Case:
    """Two caches of one model, by turns."""

    def expected() -> Results:
        model = made(Attention)
        return {name: next_logits(model, PROMPTS[row] + NEXT[row][:2])[None] for name, row in (("first", 0), ("second", 2))}

    def observe(adapters: Any) -> Results:
        model, found = made(Attention), {}
        caches = {name: adapters.prefill(model, [PROMPTS[row]], 9)[0] for name, row in (("first", 0), ("second", 2))}
        for step in range(2):
            for name, row in (("first", 0), ("second", 2)):
                found[name] = adapters.append(model, caches[name], torch.tensor([NEXT[row][step]])).clone()
        return found

    return case("two caches, by turns", {"prompts": [PROMPTS[0], PROMPTS[2]], "places": 9}, expected, observe, ALONE)


def quiet_case() -> Case:
    def observe(adapters: Any) -> Results:
        model = made(Attention)
        cache, logits = adapters.prefill(model, PROMPTS[:2], 6)
        after = adapters.append(model, cache, torch.tensor([1, 2]))
        found = {"during the calls": sorted({call.gradients for call in model.calls}), "afterwards": torch.is_grad_enabled()}
        return found | {"a graph": logits.requires_grad or after.requires_grad}

    expected = lambda: {"during the calls": [False], "afterwards": True, "a graph": False}  # noqa: E731
    return case("no gradients are recorded", {"prompts": PROMPTS[:2]}, expected, observe, 1, rung="property")


def one_column_case() -> Case:
    def observe(adapters: Any) -> Results:
        model = made(Rotary)
        cache, _ = adapters.prefill(model, PROMPTS, ROOM)
        for step in range(3):
            adapters.append(model, cache, torch.tensor([each[step] for each in NEXT]))
        return {"inputs": [list(call.ids.shape) for call in model.calls], "cached": all(call.cached for call in model.calls)}

    expected = lambda: {"inputs": [[5, 5], [5, 1], [5, 1], [5, 1]], "cached": True}  # noqa: E731
    return case("one call, one column", {"prompts": PROMPTS, "steps": 3}, expected, observe, 1, rung="budget")


CACHE = (
    cache_case("one prompt", Attention, [0], ROOM, 0),
    cache_case("a prompt of one token, token by token", Attention, [1], ROOM, 5),
    cache_case("prompts of one length", Rotary, [0, 0], 9, 2),
    cache_case("prompts of several lengths", Attention, [0, 1, 2, 3, 4], ROOM, 0),
    cache_case("prompts of several lengths, token by token", Attention, [0, 1, 2, 3, 4], ROOM, 5),
    cache_case("with rotated queries and keys", Rotary, [0, 1, 2, 3, 4], ROOM, 5),
    cache_case("the last place is filled", Attention, [1, 2], 8, 3),
    cache_case("a model in float32", Attention, [2, 1], ROOM, 3, torch.float32, rtol=1e-4, atol=1e-5),
    two_caches_case(),
    quiet_case(),
    one_column_case(),
)

# Stage 2: greedy


def best_end(model: Recorded, prompts: Prompts, limit: int) -> int:
    """The token which as the end token gives answers of the most different lengths."""
    longest = [likeliest(model, prompt, -1, limit) for prompt in prompts]
    lengths = lambda end: {ids.index(end) if end in ids else limit for ids in longest}  # noqa: E731
    return max(range(VOCABULARY), key=lambda end: len(lengths(end)))


def greedy_case(title: str, kind: Callable[[], Recorded], prompts: Prompts, limit: int, seed: int = 1, end: int | None = None) -> Case:
    chosen = best_end(made(kind, seed), prompts, limit) if end is None else end

    def observe(adapters: Any) -> Results:
        found = adapters.greedy(made(kind, seed), [list(each) for each in prompts], chosen, limit)
        return {"answers": [list(map(int, ids)) for ids in found]}

    def expected() -> Results:
        return {"answers": [likeliest(made(kind, seed), prompt, chosen, limit) for prompt in prompts]}

    return case(title, {"model": kind.__name__, "prompts": prompts, "end": chosen, "limit": limit}, expected, observe, ALONE)


def chain() -> Table:
    """After token n comes n - 1, and after 0 comes 0; tokens 8 to 10 are equally likely after themselves."""
    rows = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for token in range(8):
        rows[token, max(token - 1, 0)] = 5.0
    rows[8:, 8:] = 5.0
    return Table(rows)


def chain_case() -> Case:
    prompts = [[9, 4], [0, 1], [6], [2], [10]]
    answers = [[3, 2], [0, 0, 0, 0], [5, 4, 3, 2], [1, 0, 0, 0], [8, 8, 8, 8]]
    observe = lambda adapters: {"answers": [list(map(int, ids)) for ids in adapters.greedy(chain(), prompts, 2, 4)]}  # noqa: E731
    given = {"model": "after n comes n - 1, after 0 comes 0, after 8 to 10 each of them", "prompts": prompts, "end": 2, "limit": 4}
    return case("an end that is reached, one that never is", given, lambda: {"answers": answers}, observe, 2, rung="worked example")


def leaving_case(title: str, prompts: Prompts, ends: list[int]) -> Case:
    """ends: how many tokens each answer has. The rows of each call."""
    limit = max(ends)

    def observe(adapters: Any) -> Results:
        model = chain()
        adapters.greedy(model, prompts, 0, limit)
        return {"inputs": [list(call.ids.shape) for call in model.calls], "cached": all(call.cached for call in model.calls)}

    rows = [[sum(end > step for end in ends), 1] for step in range(1, limit)]
    expected = lambda: {"inputs": [[len(prompts), max(map(len, prompts))], *rows], "cached": True}  # noqa: E731
    given = {"model": "after n comes n - 1", "prompts": prompts, "end": 0, "limit": limit}
    return case(title, given, expected, observe, 2, rung="budget")


GREEDY = (
    chain_case(),
    greedy_case("one prompt", Attention, PROMPTS[:1], 6),
    greedy_case("answers of several lengths", Attention, PROMPTS, 9, seed=6),
    greedy_case("with rotated queries and keys", Rotary, PROMPTS, 20, seed=3),
    greedy_case("a limit of one token", Attention, PROMPTS, 1),
    greedy_case("an end that is never drawn", Rotary, PROMPTS, 8, end=VOCABULARY + 5),
    greedy_case("the room of the model is filled", Attention, [[1, 2, 3], [4] * 10], 4, end=VOCABULARY),
    leaving_case("finished rows leave", [[3], [7, 1], [5], [7]], [3, 1, 5, 7]),
    leaving_case("all are finished at once", [[2], [5, 2]], [2, 2]),
)

# Stage 5: refill

MANY = [PROMPTS[number % 5] + [number % 7 + 1] * (number % 3) for number in range(12)]
SERVED = {"end": 2, "limit": 6, "temperature": 1.3, "top_p": 0.9}


def serve_case(title: str, rows: int, kind: Callable[[], Recorded] = Attention, count: int = 12) -> Case:
    """The answers of `sample`, with their log-probabilities."""
    seeds = [100 + number for number in range(count)]

    def found(answers: list[Any]) -> Results:
        ids, log_probs = zip(*answers, strict=True)
        return {"answers": {str(number): list(map(int, each)) for number, each in enumerate(ids)}} | {
            "log-probabilities": torch.tensor([log_prob for each in log_probs for log_prob in each], dtype=torch.float64)
        }

    def observe(adapters: Any) -> Results:
        here = found(adapters.serve(made(kind), MANY[:count], seeds, *SERVED.values(), rows))
        there = found(adapters.sample(made(kind), MANY[:count], seeds, *SERVED.values()))
        other = sum(ids != there["answers"].get(number) for number, ids in here["answers"].items())
        near = here["log-probabilities"].shape == there["log-probabilities"].shape and torch.allclose(
            here["log-probabilities"], there["log-probabilities"], rtol=1e-9, atol=1e-9
        )
        return {"answers": len(here["answers"]), "that differ from those of `sample`": other, "log-probabilities are the same": near}

    expected = lambda: {"answers": count, "that differ from those of `sample`": 0, "log-probabilities are the same": True}  # noqa: E731
    return case(title, {"model": kind.__name__, "prompts": MANY[:count], "rows": rows, **SERVED}, expected, observe, 5, rung="property")


class Held(TorchDispatchMode):
    """The most bytes of tensors of several numbers that are alive at a time."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.most, self.alive = least, 0, {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.least:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def rounds(lengths: list[int], rows: int) -> Counter:
    """How many tokens are drawn in each round, where a waiting prompt begins as soon as a row is free; and "cached", the calls for them."""
    left, waiting, found = [], list(lengths), Counter()
    while left or waiting:
        fresh = [waiting.pop(0) for _ in range(min(rows - len(left), len(waiting)))]
        left = [each - 1 for each in left + fresh if each > 1]
        found["columns"] += len(left)
        found["steps"] += bool(left)
    return found


def rows_case(title: str, rows: int, lengths: list[int]) -> Case:
    """By a chain, whose answers have known lengths: what the calls cost."""
    prompts, limit = [[10] * (1 + number % 3) + [length] for number, length in enumerate(lengths)], 7
    wanted, longest = rounds(lengths, rows), max(map(len, prompts))

    def observe(adapters: Any) -> Results:
        model = chain()
        answers = adapters.serve(model, prompts, list(range(len(prompts))), 0, limit, 0.0, 1.0, rows)
        steps = sum(call.ids.shape[1] == 1 for call in model.calls)
        most, numbers = max(len(call.ids) for call in model.calls), sum(call.ids.numel() for call in model.calls)
        return {
            "lengths": [len(ids) for ids, _ in answers], "rows of a call": budget(most, rows, "rows"),
            "calls with one column": budget(steps, wanted["steps"], "calls"),
            "other calls": budget(len(model.calls) - steps, len(prompts), "calls"),
            "numbers of all inputs": budget(numbers, wanted["columns"] + longest * len(prompts), "numbers"),
        }  # fmt: skip

    def expected() -> Results:
        names = "rows of a call", "calls with one column", "other calls", "numbers of all inputs"
        return {"lengths": lengths} | dict.fromkeys(names, WITHIN)

    given = {"model": "after n comes n - 1", "prompts": prompts, "end": 0, "limit": limit, "rows": rows}
    return case(title, given, expected, observe, 5, rung="budget")


def bytes_case() -> Case:
    """Nine answers, three rows, places for 4 + 30 tokens: caches are far larger than all else. What attention needs is allowed for."""
    prompts, rows, limit = [[number % 7 + 1] * (1 + number % 4) for number in range(9)], 3, 30
    layer = 2 * 32 * 8 * (limit + 4) * rows  # bytes: keys and values of 32 numbers, for each place

    def observe(adapters: Any) -> Results:
        with Held(least=layer // 6) as held:
            adapters.serve(Table(2 * randn(VOCABULARY, VOCABULARY, seed=4), 6, 32), prompts, list(range(9)), 0, limit, 1.0, 1.0, rows)
        return {"bytes of caches": budget(held.most, 2 * 6 * layer + 3 * layer, "bytes")}

    given = {"prompts": len(prompts), "rows": rows, "limit": limit, "bytes of a cache": 6 * layer}
    return case("two caches at most", given, lambda: {"bytes of caches": WITHIN}, observe, 5, rung="budget")


REFILL = (
    serve_case("one row", 1),
    serve_case("three rows", 3),
    serve_case("three rows, with rotated queries and keys", 3, Rotary),
    serve_case("more rows than prompts", 9, count=4),
    rows_case("a row is filled as soon as it is free", 2, [7, 1, 2, 1, 1, 3]),
    rows_case("many short answers beside long ones", 3, [7, 1, 1, 5, 1, 2, 1, 7, 1, 2]),
    bytes_case(),
)
