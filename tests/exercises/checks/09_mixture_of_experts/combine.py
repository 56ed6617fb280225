"""Check of 09.combine. Oracle: torch.nn.functional.embedding_bag, which adds up weighted rows of a table, with the rows' numbers found by a
loop; torch.autograd.gradcheck for gradients.

Tolerances. float64: 1e-12, float32: 1e-6. Numbers that 16 bits hold exactly, and sums rounded once, are compared exactly.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT, cases_of, gradients, randn

BAG = "torch.nn.functional.embedding_bag, with weights"


def of(rows, order, weights, dtype=torch.float64, weights_dtype=None):
    def given():
        made = {"rows": torch.tensor(rows, dtype=dtype), "order": torch.tensor(order, dtype=torch.int64)}
        return made | {"weights": torch.tensor(weights, dtype=weights_dtype or dtype)}

    return given


def drawn(tokens, k, width, dtype=torch.float64, weights_dtype=None, seed=1):
    def given():
        order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(seed))
        weights = randn(tokens, k, seed=seed + 1, dtype=weights_dtype or dtype)
        return {"rows": randn(tokens * k, width, seed=seed, dtype=dtype), "order": order, "weights": weights}

    return given


def strided():
    made = drawn(7, 3, 5)()
    order = torch.stack([made["order"], made["order"] * 0], dim=-1)[:, 0]
    return {"rows": made["rows"].T.contiguous().T, "order": order, "weights": made["weights"].T.contiguous().T}


def equal_weights():
    """One number, shown for every choice."""
    return drawn(7, 3, 5)() | {"weights": torch.tensor(0.25, dtype=torch.float64).expand(7, 3)}


def combined(function, rows, order, weights):
    leaves = {"rows": rows.detach().requires_grad_(), "weights": weights.detach().requires_grad_()}
    found = function(order=order, **leaves)
    return {"tokens": found} | gradients(found, **leaves)


def by_bag(rows, order, weights):
    """In float64; what narrower numbers round to, once."""
    place = {choice: row for row, choice in enumerate(order.tolist())}
    bags = torch.tensor([place[choice] for choice in range(len(rows))], dtype=torch.int64).view(weights.shape)
    leaves = {"rows": rows.detach().clone().requires_grad_(), "weights": weights.detach().clone().requires_grad_()}
    table, shares = (leaf.double() for leaf in leaves.values())
    found = F.embedding_bag(bags, table, per_sample_weights=shares, mode="sum").to(rows.dtype)
    return {"tokens": found} | gradients(found, **leaves)


def answer(tokens):
    return lambda rows, **_: {"tokens": torch.tensor(tokens, dtype=rows.dtype)}


def value(function, **arguments):
    return {"tokens": function(**arguments)}


def checked(function, rows, order, weights):
    inputs = (rows.detach().requires_grad_(), weights.detach().requires_grad_())
    agrees = torch.autograd.gradcheck(lambda x, w: function(x, order, w), inputs, raise_exception=False)
    return {"the gradients are those of small differences": agrees}


def given_sizes(function):
    sizes = {f"{tokens} tokens": drawn(tokens, 4, 24, torch.float32)() for tokens in (240, 1200)}
    sizes |= {"more features": drawn(240, 4, 48, torch.float32)()}
    return cost(function, 3.5, 240 * 4 * 24 * 4, sizes)


case = cases_of(by_bag, BAG, combined)


def example(title, given, tokens, source="arithmetic"):
    return Case("worked example", title, given, answer(tokens), source, value, rtol=1e-12)


TENS = [[1.0], [10.0], [100.0], [1000.0]]

CHECK = Check(
    exercise="09.combine",
    outputs=("tokens",),
    spoilt=("tokens", "gradients through tokens"),
    cases=[
        case("shape and dtype", "float32 [6, 5]", drawn(3, 2, 5, torch.float32), source=CONTRACT),
        case("shape and dtype", "rows in bfloat16, weights in float32", drawn(3, 2, 5, torch.bfloat16, torch.float32), source=CONTRACT),
        case("shape and dtype", "rows in float32, weights in float64", drawn(3, 2, 5, torch.float32, torch.float64), source=CONTRACT),
        example("two tokens", of(TENS, [1, 2, 3, 0], [[0.5, 0.5], [0.9, 0.1]]), [[500.5], [19.0]],
                "the contract: 1000 and 1 are token 0's, 10 and 100 are token 1's"),
        example("three tokens with one choice each", of(TENS[:3], [2, 0, 1], [[1.0], [2.0], [3.0]]), [[10.0], [200.0], [3.0]]),
        example("weights differ by place: 3 * 10 + 1 * 1000, 7 * 1 + 5 * 100", of(TENS, [2, 0, 3, 1], [[3.0, 1.0], [7.0, 5.0]]),
                [[1030.0], [507.0]]),
        example("rows of two features", of([[1.0, -1.0], [10.0, -2.0]], [1, 0], [[0.5, 0.25]]), [[5.25, -1.25]]),
        example("a dropped choice has a row of zeros, whatever its weight", of([[1.0], [10.0], [0.0], [0.0]], [3, 0, 1, 2],
                                                                             [[0.5, 9.0], [7.0, 0.5]]), [[5.0], [0.5]]),
        case("property", "one choice for each token", drawn(7, 1, 3)),
        case("property", "all choices of a single token", drawn(1, 6, 3)),
        case("property", "one feature", drawn(5, 3, 1)),
        case("property", "no tokens", lambda: {"rows": torch.zeros(0, 3).double(), "order": torch.zeros(0).long(),
                                               "weights": torch.zeros(0, 2).double()}, source=CONTRACT),
        case("property", "tensors that are not contiguous", strided),
        case("property", "all weights are one number in memory", equal_weights),
        case("property", "float32 rows and float64 weights: 1e8 + 1 - 1e8",
             of([[1e8], [1.0], [-1e8]], [0, 1, 2], [[1.0, 1.0, 1.0]], torch.float32, torch.float64), tolerance=0.0),
        case("property", "float64 rows and float32 weights", drawn(7, 3, 5, torch.float64, torch.float32), tolerance=1e-6),
        case("property", "rows in bfloat16, weights in float32: rounded once, at the end", lambda: drawn(
            23, 4, 7, torch.bfloat16, torch.float32)() | {"rows": 100 * randn(92, 7, seed=3, dtype=torch.bfloat16)},
             observe=value, expected=lambda **given: {"tokens": by_bag(**given)["tokens"]}, tolerance=0.0),
        case("property", "infinity and NaN stay with their tokens", lambda: of(
            [[torch.inf], [1.0], [torch.nan], [2.0], [4.0], [8.0]], [4, 2, 1, 3, 5, 0], [[0.25, 0.5]] * 3)(), observe=value,
             expected=answer([[torch.nan], [1.25], [torch.inf]]), source="arithmetic"),
        case("property", "weights of 0 have a gradient, and rows with them one of 0", lambda: drawn(4, 3, 2)() | {
            "weights": torch.tensor([[0.0, 1.0, 0.5]] * 4, dtype=torch.float64)}),
        case("oracle", "53 tokens with 3 choices each", drawn(53, 3, 11)),
        case("oracle", "float32, 8 choices each", drawn(29, 8, 5, torch.float32, seed=6), tolerance=1e-5),
        case("oracle", "gradients by small differences", drawn(5, 2, 3), lambda **_: {"the gradients are those of small differences": True},
             "torch.autograd.gradcheck", checked),
        case("budget", "more tokens, and memory, in tensors like `rows`", dict, lambda: within(3.5), CONTRACT, given_sizes),
    ],
)  # fmt: skip
