"""Check of 12.cached_attention. Oracle: torch's scaled_dot_product_attention of one row at a time, over exactly that row's keys and values,
concatenated, where no cache, no place and no stale number exists.

Tolerances. The caches are compared exactly. float64: 1e-12 of means of numbers around 1. float32: 1e-5, since the oracle adds up in another
order. float16 and bfloat16: 2e-3 and 6e-2, of numbers up to 4 that are rounded two or
three times; 8e-3 behind stale numbers.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ARITHMETIC, CONTRACT, randn, refused
from .pieces import left_behind, nothing

TORCH = "torch's scaled_dot_product_attention, of each row alone, over its own keys and values"
CACHES = ("cached_keys", "cached_values")
RAGGED = (5, 0, 9, 3)  # of 13 places


def of(lengths, new, heads=4, shared=2, places=13, size=3, dtype=torch.float64, stale=1.0, loud=1.0, seed=1, **more):
    """Rows of a cache that holds `lengths` tokens; what stands behind them is `stale` times as large as the rest."""

    def given():
        rows = len(lengths)
        made = {"queries": loud * randn(rows, heads, new, size, seed=seed)}
        made |= {name: randn(rows, shared, new, size, seed=seed + 1 + place) for place, name in enumerate(("keys", "values"))}
        for place, name in enumerate(CACHES):
            made[name] = randn(rows, shared, places, size, seed=seed + 3 + place)
            for row, length in enumerate(lengths):
                made[name][row, :, length:] *= stale
        made = {name: tensor.to(dtype) for name, tensor in made.items()}
        return made | {"lengths": torch.tensor(lengths), "scale": 0.7} | more

    return given


def exactly(queries, keys, values, cached_keys, cached_values, lengths, scale=1.0, **more):
    """Worked examples: numbers of size 1, one row and head unless they say more."""
    parts = {"queries": queries, "keys": keys, "values": values, "cached_keys": cached_keys, "cached_values": cached_values}
    return lambda: {name: torch.tensor(part) for name, part in parts.items()} | {"lengths": torch.tensor(lengths), "scale": scale} | more


def one_row(new_keys, new_values, old_keys, old_values, length, queries=None, **more):
    def shaped(numbers):
        return [[[[float(number)] for number in numbers]]]

    return exactly(shaped(queries or [1.0] * len(new_keys)), *map(shaped, (new_keys, new_values, old_keys, old_values)), [length], **more)


def both(function, cached_keys, cached_values, **given):
    """The result, and what the caches hold afterwards."""
    result = function(cached_keys=cached_keys, cached_values=cached_values, **given)
    return {"result": result, "cached_keys": cached_keys.clone(), "cached_values": cached_values.clone()}


def by_torch(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None, used=None):
    results, new = [], queries.shape[2]
    for row, length in enumerate(lengths.tolist()):
        cached_keys[row, :, length : length + new], cached_values[row, :, length : length + new] = keys[row], values[row]
        seen = [torch.cat([cache[row, :, :length], fresh[row]], dim=1).double() for cache, fresh in
                ((cached_keys, keys), (cached_values, values))]  # fmt: skip
        each = []
        for token in range(new):
            first = 0 if window is None else max(0, length + token + 1 - window)
            own = (part[:, first : length + token + 1] for part in seen)
            each.append(F.scaled_dot_product_attention(queries[row, :, token : token + 1].double(), *own, scale=scale, enable_gqa=True))
        results.append(torch.cat(each, dim=1))
    return {"result": torch.stack(results).to(values.dtype), "cached_keys": cached_keys, "cached_values": cached_values}


def answer(result, cached_keys=None, cached_values=None):
    told = {"cached_keys": cached_keys, "cached_values": cached_values}
    return lambda **given: {"result": torch.tensor(result).reshape_as(given["queries"])} | {
        name: given[name] if numbers is None else torch.tensor(numbers).reshape_as(given[name])
        for name, numbers in told.items()}  # fmt: skip


def unchanged(function, **given):
    """A row without room: refused, and both caches as they were."""
    before = [given[name].clone() for name in CACHES]
    try:
        function(**given)
        raised = "nothing"
    except ValueError:
        raised = "ValueError"
    return {"refused with": raised} | {f"{name} as it was": torch.equal(given[name], was) for name, was in zip(CACHES, before, strict=True)}


def as_they_were(**_):
    return {"refused with": "ValueError", "cached_keys as it was": True, "cached_values as it was": True}


def views(**given):
    """Every second head and place of a larger cache, of which the rest must stay as it was."""
    made = dict(given)
    whole = {}
    for name in CACHES:
        rows, heads, places, size = given[name].shape
        whole[name] = randn(rows, 2 * heads, 2 * places, size + 1, seed=31, dtype=given[name].dtype)
        made[name] = whole[name][:, ::2, 1::2, :size]
        made[name].copy_(given[name])
    return made, whole


def in_views(function, **given):
    made, whole = views(**given)
    return {"result": function(**made)} | {f"the whole of {name}": tensor for name, tensor in whole.items()}


def views_by_torch(**given):
    made, whole = views(**given)
    return {"result": by_torch(**made)["result"]} | {f"the whole of {name}": tensor for name, tensor in whole.items()}


def token_by_token(function, queries, keys, values, lengths, **given):
    """The new tokens, one call each; who calls raises the lengths."""
    results = []
    for token in range(queries.shape[2]):
        own = (part[:, :, token : token + 1] for part in (queries, keys, values))
        results.append(function(*own, lengths=lengths + token, **given))
    return {"result": torch.cat(results, dim=2)} | {name: given[name].clone() for name in CACHES}


def transposed():
    """As projections leave them: [rows, new, heads, d], of which heads and tokens changed places."""
    made = of(RAGGED, 3)()
    return made | {name: made[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("queries", "keys", "values")}


def strided_lengths():
    made = of(RAGGED, 2)()
    return made | {"lengths": torch.stack([made["lengths"], made["lengths"] + 1], dim=1)[:, 0]}


def kept_by_who_asked(function, **given):
    """Writing to the result afterwards changes no cache."""
    result = function(**given)
    kept = result.clone()
    result.fill_(7)
    return {"result": kept} | {name: given[name].clone() for name in CACHES}


def without_numbers(function, **given):
    """On the device meta, whose tensors hold no numbers: to read one raises, as it would make a program wait for a GPU."""
    result = function(**{name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in given.items()})
    return {"device": result.device.type, "shape": list(result.shape)}


def of_meta(queries, **_):
    return {"device": "meta", "shape": list(queries.shape)}


def blank(lengths, new, heads):
    """Zeros in caches of 2,048 places, where numbers are not looked at: drawing them would take longest."""
    fresh = {"queries": (heads, new), "keys": (2, new), "values": (2, new)} | dict.fromkeys(CACHES, (2, 2048))
    return {name: torch.zeros(len(lengths), *shape, 16) for name, shape in fresh.items()} | {"lengths": torch.tensor(lengths), "scale": 0.7}


def few_of_many(function):
    """Rows of 8 tokens at most in a cache of 2,048 places; then more of everything."""
    sizes = {name: blank([used - 1 - row % 3 for row in range(rows)], new, heads)
             for name, rows, used, new, heads in (
                 ("first", 3, 8, 1, 4), ("30 rows", 30, 8, 1, 4), ("longer rows", 3, 400, 1, 4),
                 ("9 new tokens", 3, 8, 9, 4), ("24 heads", 3, 8, 1, 24))}  # fmt: skip
    return cost(function, 0.04, 3 * 2 * 2048 * 16 * 4, sizes)


def case(rung, title, given, expected=by_torch, source=TORCH, observe=both, tolerance=1e-12):
    return Case(rung, title, given, expected, source, observe, CACHES, rtol=tolerance, atol=tolerance)


def example(title, given, *told, source=ARITHMETIC):
    return Case("worked example", title, given, answer(*told), source, both, CACHES, rtol=1e-5, atol=1e-5)


LOG3 = 1.0986123
CHECK = Check(
    exercise="12.cached_attention",
    outputs=("result",),
    spoilt=("result", "elements of cached_keys", "elements of cached_values"),
    cases=[
        case("shape and dtype", "6 query heads, 2 key-value heads, 3 new tokens", of(RAGGED, 3, 6), source=CONTRACT),
        case("shape and dtype", "bfloat16, one new token", of(RAGGED, 1, dtype=torch.bfloat16), source=CONTRACT),
        case("shape and dtype", "float16, a window", of(RAGGED, 2, dtype=torch.float16, window=3), source=CONTRACT),
        example("the contract's first: an empty row", one_row([0], [4], [99] * 4, [99] * 4, 0), [4.0], [0.0, 99, 99, 99], [4.0, 99, 99, 99],
                source=CONTRACT),
        example("the contract's second: equal scores, the mean of 4 and 8", one_row([0], [8], [0, 99, 99, 99], [4, 99, 99, 99], 1), [6.0],
                [0.0, 0, 99, 99], [4.0, 8, 99, 99], source=CONTRACT),
        example("scores 0 and log 3: weights 1/4 and 3/4; the cache is full then", one_row([LOG3], [8], [0, 50], [4, 50], 1), [7.0],
                [0.0, LOG3], [4.0, 8]),
        example("a scale of 1/2 on a score of 2 log 3", one_row([2 * LOG3], [8], [0, 50, 50], [4, 50, 50], 1, scale=0.5), [7.0],
                [0.0, 2 * LOG3, 50], [4.0, 8, 50]),
        example("three new tokens behind one: means of 1 and 10, then 100, then 1000",
                one_row([0, 0, 0], [10, 100, 1000], [0, 50, 50, 50, 50], [1, 50, 50, 50, 50], 1), [5.5, 37.0, 277.75],
                [0.0, 0, 0, 0, 50], [1.0, 10, 100, 1000, 50]),
        example("... of which each looks at 2 places", one_row([0, 0, 0], [10, 100, 1000], [0, 50, 50, 50], [1, 50, 50, 50], 1, window=2),
                [5.5, 55.0, 550.0], [0.0, 0, 0, 0], [1.0, 10, 100, 1000]),
        example("heads 0 and 1 share the first key-value head, 2 and 3 the second",
                exactly([[[[0.0]]] * 4], [[[[0.0]], [[0.0]]]], [[[[10.0]], [[20.0]]]], [[[[9.0]] * 2] * 2], [[[[9.0]] * 2] * 2], [0]),
                [10.0, 10, 20, 20], [0.0, 9, 0, 9], [10.0, 9, 20, 9]),
        example("rows of 2 and of 0 tokens: means of 1, 3 and 8, and of 6 alone",
                exactly([[[[0.0]]]] * 2, [[[[0.0]]]] * 2, [[[[8.0]]], [[[6.0]]]], [[[[0.0], [0.0], [7.0]]]] * 2,
                        [[[[1.0], [3.0], [7.0]]], [[[7.0], [7.0], [7.0]]]], [2, 0]),
                [4.0, 6.0], [0.0, 0, 0, 0, 0, 7], [1.0, 3, 8, 6, 7, 7]),
        case("property", "rows of different lengths, one new token", of(RAGGED, 1)),
        case("property", "... several new tokens", of(RAGGED, 4)),
        case("property", "rows of equal lengths", of((4, 4, 4), 2)),
        case("property", "the first row is the longest", of((9, 5, 0), 2)),
        case("property", "empty rows, as of a prompt", of((0, 0, 0), 5)),
        case("property", "... in a window of 2", of((0, 0, 0), 5, window=2)),
        case("property", "one row", of((6,), 2)),
        case("property", "as many rows as new tokens", of((1, 6, 2), 3)),
        case("property", "the cache is full afterwards, in one row", of((9, 4, 10), 3)),
        case("property", "... in the first row", of((10, 4, 3), 3)),
        case("property", "... in all rows", of((10, 10), 3)),
        case("property", "a cache of one place", of((0, 0), 1, places=1)),
        case("property", "a row has no room", of((4, 11, 2), 3), as_they_were, CONTRACT, unchanged),
        case("property", "the first row has no room, by one place", of((13, 11, 2), 1), as_they_were, CONTRACT, unchanged),
        case("property", "the last row has no room for the last of 3 tokens", of((0, 1, 11), 3), as_they_were, CONTRACT, unchanged),
        case("property", "an empty row has no room", of((0, 0), 14), refused, CONTRACT),
        case("property", "the longest row is told", of(RAGGED, 3, used=12)),
        case("property", "... and has no room", of((4, 11, 2), 3, used=14), as_they_were, CONTRACT, unchanged),
        case("property", "... in a window, and no number is read from a tensor, on another device", of(RAGGED, 3, window=4, used=12),
             of_meta, CONTRACT, without_numbers),
        case("property", "a window of 1: each token looks at itself", of(RAGGED, 3, window=1)),
        case("property", "a window of 2", of(RAGGED, 3, window=2)),
        case("property", "a window of 4, longer than some rows", of(RAGGED, 2, window=4)),
        case("property", "a window that is larger than the cache", of(RAGGED, 3, window=100)),
        case("property", "as many heads of both kinds", of(RAGGED, 2, 3, 3)),
        case("property", "one key-value head for 5", of(RAGGED, 2, 5, 1)),
        case("property", "3 query heads for each of 2", of(RAGGED, 2, 6, 2)),
        case("property", "2 query heads for each of 3", of(RAGGED, 2, 6, 3)),
        case("property", "stale numbers around 1e30", of(RAGGED, 2, stale=1e30)),
        case("property", "... in float32", of(RAGGED, 2, stale=1e30, dtype=torch.float32), tolerance=1e-5),
        case("property", "... and a window", of(RAGGED, 1, stale=-1e30, window=3)),
        case("property", "stale numbers around 10,000 in float16", of(RAGGED, 2, stale=1e4, dtype=torch.float16), tolerance=8e-3),
        case("property", "scores of thousands do not overflow", of(RAGGED, 2, loud=3000.0), tolerance=1e-9),
        case("property", "all scores are far below 0", lambda: of(RAGGED, 2)() | {"scale": -4000.0}, tolerance=1e-9),
        case("property", "... below -1e12", lambda: of(RAGGED, 2)() | {"scale": -4e12}, tolerance=1e-6),
        case("property", "new values of a million", lambda: of(RAGGED, 2)() | {"values": 1e6 * of(RAGGED, 2)()["values"]}, tolerance=1e-9),
        case("property", "a scale of 0: the mean of all places", lambda: of(RAGGED, 2)() | {"scale": 0.0}),
        case("property", "float16", of(RAGGED, 2, dtype=torch.float16), tolerance=2e-3),
        case("property", "bfloat16", of(RAGGED, 2, dtype=torch.bfloat16), tolerance=6e-2),
        case("property", "queries, keys and values that are not contiguous", transposed),
        case("property", "lengths that are not contiguous", strided_lengths),
        case("property", "the caches are views into larger ones", of(RAGGED, 2), views_by_torch, observe=in_views),
        case("property", "three new tokens, one call each", of(RAGGED, 3), observe=token_by_token),
        case("property", "... in a window", of(RAGGED, 3, window=3), observe=token_by_token),
        case("property", "who writes to the result", of(RAGGED, 2), observe=kept_by_who_asked),
        case("property", "... behind empty rows, one key-value head for 5", of((0, 0), 1, 5, 1), observe=kept_by_who_asked),
        case("property", "... behind empty rows, as many heads of both kinds", of((0, 0), 1, 2, 2), observe=kept_by_who_asked),
        case("property", "torch's settings and random numbers", of(RAGGED, 2), nothing, CONTRACT, left_behind),
        case("oracle", "17 rows of up to 40 tokens, 12 heads", of([7 * row % 41 for row in range(17)], 3, 12, 4, 43, 8)),
        case("oracle", "... in float32, in a window of 11",
             of([7 * row % 41 for row in range(17)], 3, 12, 4, 43, 8, torch.float32, window=11), tolerance=1e-5),
        case("budget", "more rows, places, tokens and heads, and memory, in caches of keys", dict, lambda: within(0.04), CONTRACT,
             few_of_many),
    ],
)  # fmt: skip
