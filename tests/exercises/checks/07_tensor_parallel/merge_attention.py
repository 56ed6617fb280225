"""Check of 07.merge_attention. Oracle: torch's scaled dot-product attention over all keys at once, and torch.logsumexp of all scores.

Tolerances. Weights are quotients of small whole numbers, computed by a logarithm and an exponential: 1e-6 in float32. The oracle adds
float64 numbers in another order: 1e-12. 24 merges in float32: 1e-5.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = "F.scaled_dot_product_attention over all keys, torch.logsumexp of all scores"
NOTHING = -torch.inf


def rows(values: list[float], logs: list[float], dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """A part of one head: an output of two numbers, value and 0.1 times value, and a log-sum-exp for each query."""
    value = torch.tensor(values, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return torch.stack([value, 0.1 * value], dim=-1)[None, None], torch.tensor(logs, dtype=wide)[None, None]


def two_parts(first: tuple[list, list], second: tuple[list, list], dtype=torch.float32):
    def given():
        (out, lse), (other_out, other_lse) = rows(*first, dtype), rows(*second, dtype)
        return {"out": out, "lse": lse, "other_out": other_out, "other_lse": other_lse}

    return given


def answer(values: list[float], logs: list[float]):
    out, lse = rows(values, logs)
    return lambda **_: {"out": out, "lse": lse}


def random_parts(*shape: int, dtype=torch.float32):
    """Outputs [*shape, 6], and a log-sum-exp for each query; of some queries one part has nothing."""

    def given():
        generator = torch.Generator().manual_seed(5)
        out, other_out = (torch.randn(*shape, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        lse, other_lse = (3 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
        lse[..., 1], out[..., 1, :] = NOTHING, 0.0
        wide = torch.promote_types(dtype, torch.float32)
        return {"out": out.to(dtype), "lse": lse.to(wide), "other_out": other_out.to(dtype), "other_lse": other_lse.to(wide)}

    return given


def in_double(out, lse, other_out, other_lse):
    """By a softmax over the two log-sum-exps, in float64."""
    both = torch.stack([lse, other_lse]).double()
    weights = both.softmax(dim=0).unsqueeze(-1)
    dtype = torch.promote_types(out.dtype, torch.float32)
    return {"out": (weights[0] * out + weights[1] * other_out).to(dtype), "lse": both.logsumexp(dim=0).to(dtype)}


def attention(parts: int, keys: int, dtype=torch.float64):
    """Queries, and the keys and values of several parts; query 0 may look at the first part alone, and the last one at all."""

    def given():
        generator = torch.Generator().manual_seed(8)
        queries, some = (torch.randn(2, 3, count, 4, generator=generator, dtype=torch.float64) for count in (5, 2 * parts * keys))
        last = (torch.arange(5) * parts * keys // 5).clamp(min=keys - 1)
        last[-1] = parts * keys
        allowed = torch.arange(parts * keys) <= last[:, None]
        return {"queries": queries.to(dtype), "keys": some[:, :, ::2].to(dtype), "values": some[:, :, 1::2].to(dtype),
                "allowed": allowed, "parts": parts}  # fmt: skip

    return given


def merged_parts(function, queries, keys, values, allowed, parts, backwards=False):
    """Attention to each part by itself, then merged one after the other."""
    pieces = zip(*(x.chunk(parts, dim=-2) for x in (keys, values)), allowed.chunk(parts, dim=-1), strict=True)
    found = None
    for some_keys, some_values, some_allowed in list(pieces)[:: -1 if backwards else 1]:
        scores = (queries @ some_keys.mT * 0.5).masked_fill(~some_allowed, NOTHING)
        part = scores.softmax(dim=-1).nan_to_num(0.0) @ some_values, scores.logsumexp(dim=-1)
        found = part if found is None else tuple(function(*found, *part))
    return dict(zip(("out", "lse"), found, strict=True))


def merged_backwards(function, **arguments):
    return merged_parts(function, **arguments, backwards=True)


def all_at_once(queries, keys, values, allowed, parts):
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, scale=0.5)
    return {"out": out, "lse": (queries @ keys.mT * 0.5).masked_fill(~allowed, NOTHING).logsumexp(dim=-1)}


LOG2, LOG3 = math.log(2.0), math.log(3.0)

CHECK = Check(
    exercise="07.merge_attention",
    outputs=("out", "lse"),
    spoilt=("out", "lse"),
    cases=[
        Case("shape and dtype", "[2, 3, 5, 6] in float32", random_parts(2, 3, 5), in_double, CONTRACT),
        Case("shape and dtype", "[2, 3, 5, 6] in bfloat16", random_parts(2, 3, 5, dtype=torch.bfloat16), in_double, CONTRACT),
        Case("shape and dtype", "[2, 3, 5, 6] in float64", random_parts(2, 3, 5, dtype=torch.float64), in_double, CONTRACT),
        Case(
            "worked example", "two keys with values 8 and 12, and one key with value 40 that weighs as much as both",
            two_parts(([10.0], [LOG2]), ([40.0], [LOG2])), answer([25.0], [math.log(4.0)]), "arithmetic: (2 * 10 + 2 * 40) / 4",
            atol=1e-6,
        ),
        Case(
            "worked example", "the other part weighs three times as much", two_parts(([10.0], [0.0]), ([50.0], [LOG3])),
            answer([40.0], [math.log(4.0)]), "arithmetic: (1 * 10 + 3 * 50) / 4",
        ),
        Case(
            "worked example", "this part weighs three times as much", two_parts(([10.0], [LOG3]), ([50.0], [0.0])),
            answer([20.0], [math.log(4.0)]), "arithmetic: (3 * 10 + 1 * 50) / 4",
        ),
        Case(
            "property", "a part whose values add up to 0 weighs as much as any other", two_parts(([0.0], [0.0]), ([50.0], [LOG3])),
            answer([37.5], [math.log(4.0)]), "arithmetic: (1 * 0 + 3 * 50) / 4",
        ),
        Case(
            "property", "queries that may look at one of the two parts only",
            two_parts(([7.0, 0.0], [2.0, NOTHING]), ([0.0, 9.0], [NOTHING, -3.0])), answer([7.0, 9.0], [2.0, -3.0]),
            "arithmetic: exp(-inf) = 0, so the other part is all",
        ),
        Case(
            "property", "a query that may look at neither part", two_parts(([0.0, 1.0], [NOTHING, 0.0]), ([0.0, 1.0], [NOTHING, 0.0])),
            answer([0.0, 1.0], [NOTHING, LOG2]), CONTRACT,
        ),
        Case(
            "property", "scores of 100 and 400, and of -400",
            two_parts(([10.0, 10.0, 10.0], [100.0, 400.0, -400.0]),
            ([50.0, 50.0, 50.0], [100.0, 400.0 + LOG3, -400.0 + LOG3])),
            answer([30.0, 40.0, 40.0], [100.0 + LOG2, 400.0 + math.log(4.0), -400.0 + math.log(4.0)]),
            "arithmetic: only the difference decides", rtol=1e-4,
        ),
        Case(
            "property", "one part weighs e^600 times as much, either way",
            two_parts(([10.0, 10.0], [300.0, -300.0]), ([50.0, 50.0], [-300.0, 300.0])), answer([10.0, 50.0], [300.0, 300.0]),
            "arithmetic: the other is nothing beside it",
        ),
        Case(
            "property", "outputs in bfloat16 are weighed and added in float32", random_parts(2, 3, 5, dtype=torch.bfloat16), in_double,
            "the same in float64", rtol=2e-6, atol=2e-6,
        ),
        Case("property", "[2, 3, 5, 6] in float32", random_parts(2, 3, 5), in_double, "the same in float64", rtol=2e-6, atol=2e-6),
        Case("oracle", "three parts of 7 keys", attention(3, 7), all_at_once, ORACLE, merged_parts, rtol=1e-12, atol=1e-12),
        Case(
            "oracle", "three parts of 7 keys, the last one first", attention(3, 7), all_at_once, ORACLE, merged_backwards, rtol=1e-12,
            atol=1e-12,
        ),
        Case(
            "oracle", "25 parts in float32", attention(25, 3, torch.float32), all_at_once, ORACLE, merged_parts, rtol=1e-5, atol=1e-5,
        ),
    ],
)  # fmt: skip
