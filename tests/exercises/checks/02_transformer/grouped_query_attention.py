"""Check of 02.grouped_query_attention. Oracle: torch.nn.functional.scaled_dot_product_attention with enable_gqa.

Tolerances. float64: sums of at most 17 terms behind a softmax agree to a few 1e-16; 1e-12, with 1e-14 for gradients near 0.
float32: 1e-5, since the oracle groups its sums otherwise. bfloat16 rounds scores, weights and results to 8 bits, the oracle
only the results: a mean of values of size 1 is off by at most 3 * 2**-8, here 2e-2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case, Check

from .common import randn
from .pieces import expecting, observing

CONTRACT = "the contract"
ORACLE = "torch.nn.functional.scaled_dot_product_attention(..., enable_gqa=True)"


def random(batch: int, heads: int, shared: int, length: int, keys: int, size: int, dtype=torch.float64, **more):
    """Queries [batch, heads, length, size] against keys and values [batch, shared, keys, size]; `more` makes the rest."""

    def given():
        return {
            "queries": randn(batch, heads, length, size, seed=3, dtype=dtype),
            "keys": randn(batch, shared, keys, size, seed=5, dtype=dtype),
            "values": randn(batch, shared, keys, size, seed=7, dtype=dtype),
        } | {name: make() if callable(make) else make for name, make in more.items()}

    return given


def causal(length: int, keys: int | None = None):
    return lambda: torch.ones(length, keys or length, dtype=torch.bool).tril((keys or length) - length)[None, None]


def own_masks():
    """[2, 1, 5, 5]: each row of the batch has its own."""
    return torch.stack([causal(5)()[0], ~causal(5)()[0] | torch.eye(5, dtype=torch.bool)])


def with_blind_rows():
    mask = causal(5)().repeat(2, 1, 1, 1)
    mask[0, :, 3], mask[1, :, 0] = False, False
    return mask


def bias(heads: int, length: int):
    return lambda: randn(1, heads, length, length, seed=11, scale=2.0)


def bias_of_rows(rows: int, heads: int, queries: int, keys: int):
    return lambda: randn(rows, heads, queries, keys, seed=13, scale=2.0)


def fine_bias():
    """Between neighbours of half precision: 200 and steps of 0.1, of which bfloat16 near 200 has none below 1."""
    return 200 + 0.1 * torch.arange(11.0)[None, None, None]


def many_equal_keys():
    """70,000 keys, more than the largest number of float16."""
    given = {"queries": torch.zeros(1, 2, 1, 1), "keys": torch.ones(1, 1, 70_000, 1), "values": torch.full((1, 1, 70_000, 1), 2.0)}
    return {name: tensor.half() for name, tensor in given.items()}


def with_nan():
    """One query is not a number, and so are its weights."""
    given = random(2, 4, 2, 5, 5, 3, mask=causal(5))()
    given["queries"][1, 2, 3] = torch.nan
    return given


def nan_by_torch(queries, keys, values, mask):
    found = by_torch(queries.nan_to_num(), keys, values, mask)
    found[1, 2, 3] = torch.nan
    return {"result": found}


def transposed():
    given = random(2, 4, 2, 5, 5, 3)()
    return {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in given.items()}


def exactly(queries: list, keys: list, values: list, **more):
    return lambda: {name: torch.tensor(value) for name, value in (("queries", queries), ("keys", keys), ("values", values))} | more


def answer(result: list):
    return lambda **given: {"result": torch.tensor(result)}


def by_torch(queries, keys, values, mask: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None):
    added = mask
    if bias is not None:
        added = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, scale=scale, enable_gqa=True)


def result_by_torch(**given):
    return {"result": by_torch(**given)}


def in_double(queries, keys, values, bias: Tensor | None = None, **more):
    """With the bias in float64 too: PyTorch's kernel for CPUs reads a float32 one beside float64 queries wrongly (findings/)."""
    wide = by_torch(queries.double(), keys.double(), values.double(), bias=None if bias is None else bias.double(), **more)
    return {"result": wide.to(values.dtype)}


def blind(function, queries, keys, values, mask):
    """The result and gradients where a query may look nowhere, and of the others beside them."""
    return observing("queries", "keys", "values")(function, queries=queries, keys=keys, values=values, mask=mask)


def blind_by_torch(queries, keys, values, mask):
    """torch's answer for a mask that is open for blind rows, and the contract's zeros in their place."""
    seeing = mask.any(dim=-1, keepdim=True)

    def opened(queries, keys, values):
        return by_torch(queries, keys, values, mask=mask | ~seeing) * seeing

    return expecting(opened, "queries", "keys", "values")(queries=queries, keys=keys, values=values)


def gradient_case(title: str, given, *more: str) -> Case:
    leaves = ("queries", "keys", "values", *more)
    return Case("oracle", title, given, expecting(by_torch, *leaves), ORACLE, observe=observing(*leaves), rtol=1e-11, atol=1e-14)


def oracle_case(title: str, given, rung: str = "oracle", rtol: float = 1e-12, atol: float = 1e-15) -> Case:
    return Case(rung, title, given, result_by_torch, ORACLE, rtol=rtol, atol=atol)


TWO_HEADS = [[[[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]]]  # four queries of zeros: every key is equally likely

CHECK = Check(
    exercise="02.grouped_query_attention",
    outputs=("result",),
    spoilt=("result", "gradients through result"),
    forbidden=("scaled_dot_product_attention", "multi_head_attention_forward"),
    cases=[
        Case("shape and dtype", "6 query heads, 2 key-value heads", random(2, 6, 2, 5, 7, 3), result_by_torch, CONTRACT),
        Case("shape and dtype", "bfloat16", random(1, 2, 1, 3, 3, 4, dtype=torch.bfloat16), result_by_torch, CONTRACT),
        Case(
            "worked example",
            "equal scores: the mean of the values",
            exactly([[[[0.0, 0.0]]]], [[[[1.0, 0.0], [3.0, 4.0]]]], [[[[1.0, 0.0], [3.0, 4.0]]]]),
            answer([[[[2.0, 2.0]]]]),
            "arithmetic: half of each",
        ),
        Case(
            "worked example",
            "scores 0 and log 3: weights 1/4 and 3/4",
            exactly([[[[1.0, 0.0, 0.0, 0.0]]]], [[[[0.0, 0.0, 0.0, 0.0], [2.1972246, 5.0, 0.0, 0.0]]]], [[[[4.0], [8.0]]]]),
            answer([[[[7.0]]]]),
            "arithmetic: 2.1972246 is 2 log 3, divided by sqrt(4); 4 / 4 + 8 * 3 / 4 = 7",
        ),
        Case(
            "worked example",
            "heads 0 and 1 share the first key-value head, 2 and 3 the second",
            exactly(TWO_HEADS, [[[[1.0, 2.0]], [[3.0, 4.0]]]], [[[[10.0]], [[20.0]]]]),
            answer([[[[10.0]], [[10.0]], [[20.0]], [[20.0]]]]),
            "the contract: g = h // (H / K)",
        ),
        Case(
            "worked example",
            "one key is hidden",
            exactly([[[[0.0, 0.0]]]], [[[[1.0, 0.0], [3.0, 4.0]]]], [[[[1.0, 0.0], [3.0, 4.0]]]], mask=torch.tensor([[[[True, False]]]])),
            answer([[[[1.0, 0.0]]]]),
            "the contract: True where a query may look",
        ),
        Case(
            "worked example",
            "float64: scores of 100,000,000 and one more, which float32 cannot tell apart",
            lambda: {
                "queries": torch.full((1, 1, 1, 1), 1e8, dtype=torch.float64),
                "keys": torch.tensor([[[[1.0], [1.0 + 1e-8]]]], dtype=torch.float64),
                "values": torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64),
            },
            lambda **given: {"result": torch.tensor([[[[0.7310586]]]], dtype=torch.float64)},
            "arithmetic: 1 / (1 + exp(-1)) = 0.7310586; the contract: float64 for float64 input",
        ),
        oracle_case("multi-head: as many of both", random(2, 3, 3, 5, 5, 7), "property"),
        oracle_case("multi-query: one for all", random(2, 3, 1, 5, 5, 7), "property"),
        oracle_case("a scale of 0: all keys alike", random(2, 4, 2, 3, 5, 7, scale=0.0), "property"),
        oracle_case("a scale that is given", random(2, 4, 2, 3, 5, 7, scale=1.0), "property"),
        oracle_case("a causal mask", random(2, 4, 2, 5, 5, 7, mask=causal(5)), "property"),
        oracle_case("a mask for each row of the batch", random(2, 4, 2, 5, 5, 7, mask=own_masks), "property"),
        oracle_case("one query and many keys, as in generation", random(2, 6, 2, 1, 11, 3, mask=causal(1, 11)), "property"),
        oracle_case("a bias for each head", random(2, 4, 2, 5, 5, 7, bias=bias(4, 5)), "property"),
        oracle_case("a bias, a mask and a scale", random(2, 4, 2, 5, 5, 7, bias=bias(4, 5), mask=causal(5), scale=0.7), "property"),
        oracle_case("a bias for each row of the batch", random(2, 4, 2, 5, 5, 7, bias=bias_of_rows(2, 4, 5, 5)), "property"),
        oracle_case("a bias for each row and key, for all heads", random(3, 4, 2, 5, 7, 3, bias=bias_of_rows(3, 1, 1, 7)), "property"),
        oracle_case("as many queries as heads, and rows", random(4, 4, 2, 4, 4, 4, mask=causal(4)), "property"),
        oracle_case("tensors that are not contiguous", transposed, "property"),
        Case(
            "property",
            "a query that is NaN: its result is NaN, and no other one's",
            with_nan,
            nan_by_torch,
            "the contract: NaN is not hidden",
            rtol=1e-12,
            atol=1e-15,
        ),
        Case(
            "property",
            "float16, and more equal keys than it has numbers for",
            many_equal_keys,
            lambda **given: {"result": torch.full((1, 2, 1, 1), 2.0).half()},
            "arithmetic: the mean of 70,000 times 2; the contract: the softmax is computed in float32",
            rtol=2e-2,
        ),
        Case(
            "property",
            "bfloat16 with a float32 bias of about 200",
            random(1, 2, 1, 3, 11, 4, dtype=torch.bfloat16, bias=fine_bias),
            in_double,
            "the contract: the bias is added in float32",
            rtol=3e-2,
            atol=3e-2,
        ),
        Case(
            "property",
            "bfloat16 with a bfloat16 bias of 200 for all: as without it",
            random(1, 2, 1, 3, 11, 4, dtype=torch.bfloat16, bias=lambda: torch.full((1, 1, 1, 11), 200.0).bfloat16()),
            lambda bias, **given: in_double(**given),
            "softmax, which the same number for all leaves as it is; the contract: the bias is added in float32",
            rtol=3e-2,
            atol=3e-2,
        ),
        Case(
            "property",
            "queries that may look nowhere: zeros, and no NaN in any gradient",
            random(2, 4, 2, 5, 5, 3, mask=with_blind_rows),
            blind_by_torch,
            "the contract: a result and a gradient of 0",
            observe=blind,
            rtol=1e-11,
            atol=1e-14,
        ),
        Case(
            "property",
            "scores of 1,000 do not overflow",
            lambda: {name: tensor * 20 for name, tensor in random(1, 4, 2, 5, 5, 7)().items()},
            result_by_torch,
            ORACLE,
            rtol=1e-9,
            atol=1e-9,
        ),
        oracle_case("float32", random(3, 6, 2, 11, 13, 8, dtype=torch.float32), rtol=1e-5, atol=1e-6),
        Case(
            "oracle",
            "bfloat16",
            random(2, 6, 2, 11, 13, 8, dtype=torch.bfloat16, mask=causal(11, 13)),
            in_double,
            ORACLE,
            rtol=2e-2,
            atol=2e-2,
        ),
        gradient_case("gradients of queries, keys and values", random(2, 6, 2, 5, 7, 3)),
        gradient_case("gradients under a mask", random(2, 6, 3, 5, 5, 7, mask=causal(5))),
        gradient_case("gradients with a bias, and of it", random(2, 4, 2, 5, 5, 3, bias=bias(4, 5), mask=causal(5)), "bias"),
    ],
)
