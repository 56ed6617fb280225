"""Check of 01.sample_next. Oracle: exponentials of Python's own, divided by their sum. They equal transformers' TemperatureLogitsWarper
and TopKLogitsWarper with softmax (`tests/parity/test_check_oracles.py`), which a learner need not install.

Tolerance. Sampling is checked by frequencies: a token's share of 40,000 draws has a standard deviation of at most 0.0025. A
right answer is off by more than five of them, 0.0125, about once in two million times; a token that the oracle cuts off may
not be drawn once. Generators are seeded, so the same answer always gets the same verdict.
"""

import math

import torch
from torch import Generator, Tensor

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = "Python's own exponentials of the k largest logits, divided by their sum"
DRAWS = 40_000
ROW = [1.0, 2.5, -0.5, 2.0, 0.0]  # likeliest first: 1, 3, 0, 4, 2
OTHER = [0.5, -1.0, 1.5, -0.5, 3.0]  # 4, 2, 0, 3, 1
THIRD = [2.5, 0.0, 1.5, 1.0, -0.5]  # 0, 2, 3, 1, 4


def rows(*logits: list[float], dtype=torch.float32, **options):
    return lambda: {"logits": torch.tensor(logits, dtype=dtype), **options}


def many(*logits: list[float], **options):
    """The rows, DRAWS times over."""
    return lambda: {"logits": torch.tensor(logits).repeat(DRAWS, 1), "generator": Generator().manual_seed(3), **options}


def token_ids(*ids: int):
    return lambda **given: {"ids": torch.tensor(ids)}


def refused(**given):
    return {"raised": "ValueError"}


def whether_refused(function, **given):
    """Not what was drawn instead: that depends on how an answer draws."""
    function(**given)
    return {"raised": "nothing"}


def frequencies(function, logits, **options):
    drawn = function(logits, **options)
    distinct = len(logits) // DRAWS
    return results(torch.stack([torch.bincount(drawn[row::distinct], minlength=logits.shape[1]) / DRAWS for row in range(distinct)]))


def probabilities(logits, generator, temperature=1.0, top_k=None):
    return results(torch.tensor([odds_of(row, temperature, top_k) for row in logits[: len(logits) // DRAWS].tolist()]))


def odds_of(row: list[float], temperature: float, top_k: int | None) -> list[float]:
    """The probability of each token: exp(logit / temperature) of those that are at least the top_k-th largest, over their sum."""
    largest = sorted(row, reverse=True)
    least = largest[min(top_k or len(row), len(row)) - 1]
    weights = [math.exp((logit - largest[0]) / temperature) if logit >= least else 0.0 for logit in row]
    return [weight / math.fsum(weights) for weight in weights]


def results(shares: Tensor) -> dict:
    """Each row's shares, and the tokens that have none."""
    found = {}
    for number, share in enumerate(shares):
        row = f" in row {number}" if len(shares) > 1 else ""
        found |= {f"share of each token{row}": share, f"tokens never drawn{row}": (share == 0).nonzero().flatten().tolist()}
    return found


def frequency_case(title: str, given) -> Case:
    return Case("oracle", title, given, probabilities, ORACLE, frequencies, atol=0.0125)


def odds_case(title: str, odds: list[float], expected: list[float], source: str, rung: str = "worked example", **options) -> Case:
    """A case whose logits are the logarithms of small odds."""
    given = many([math.log(odd) for odd in odds], **options)
    return Case(rung, title, given, lambda **given: results(torch.tensor([expected])), source, frequencies, atol=0.0125)


def seen(function, logits):
    """The different tokens that 200 calls draw; each of three equally likely ones is missing with probability 1e-35."""
    return {"different tokens drawn": sorted({function(logits).item() for _ in range(200)})}


def ties(function, logits, generator):
    """Of three tokens that tie for the second of two places, one may be kept or all: what is seen must be true of both."""
    drawn = set(function(logits, top_k=2, generator=generator).tolist())
    tied = bool(drawn & {1, 2, 3})
    return {"the likeliest is drawn": 0 in drawn, "one that ties is drawn": tied, "a less likely one is drawn": 4 in drawn}


def upper_half(function, logits, generator):
    drawn = function(logits, generator=generator)
    return {"share of ids from 500 on": (drawn >= 500).double().mean()}


def left_as_it_was(function, logits):
    function(logits)
    return {"logits.requires_grad afterwards": logits.requires_grad}


def with_generator(function, logits):
    """Two calls with one generator, a third with a fresh one of the same seed; torch's default one watched meanwhile."""
    default = torch.get_rng_state()
    one, fresh = Generator().manual_seed(7), Generator().manual_seed(7)
    first, second, third = function(logits, generator=one), function(logits, generator=one), function(logits, generator=fresh)
    return {
        "the same seed draws the same": torch.equal(first, third), "the next call draws the same": torch.equal(first, second),
        "torch's default generator was used": not torch.equal(default, torch.get_rng_state()),
    }


def without_generator(function, logits):
    """Three calls with torch's default generator, seeded before the first and again before the third."""
    torch.manual_seed(7)
    first, second = function(logits), function(logits)
    torch.manual_seed(7)
    third = function(logits)
    return {"the same seed draws the same": torch.equal(first, third), "the next call draws the same": torch.equal(first, second)}


def of_generators(**default):
    return lambda **given: {"the same seed draws the same": True, "the next call draws the same": False} | default


CHECK = Check(
    exercise="01.sample_next",
    outputs=("ids",),
    spoilt=("ids",),
    cases=[
        Case("shape and dtype", "one row", rows(ROW), token_ids(1), CONTRACT),
        Case("shape and dtype", "three rows, the likeliest tokens", rows(ROW, OTHER, THIRD, temperature=0.0), token_ids(1, 4, 0), CONTRACT),
        Case(
            "worked example", "temperature 0 of one row", rows([1.0, 3.0, 2.0], temperature=0.0), token_ids(1),
            "the contract: the likeliest",
        ),
        Case(
            "worked example", "temperature 0 of three rows", rows(ROW, OTHER, THIRD, temperature=0.0), token_ids(1, 4, 0),
            "the contract: the likeliest of each row",
        ),
        odds_case("temperature 1, logits log(1) and log(3)", [1, 3], [0.25, 0.75], "arithmetic: 1 to 3"),
        odds_case("temperature 0.5, logits log(1) and log(3)", [1, 3], [0.1, 0.9], "arithmetic: 1**2 to 3**2", temperature=0.5),
        odds_case(
            "top_k 2, logits log(3), log(6), log(1) and log(4)", [3, 6, 1, 4], [0, 0.6, 0, 0.4],
            "arithmetic: 6 to 4, and tokens 0 and 2 are cut off", top_k=2,
        ),
        Case(
            "worked example", "top_k 1 leaves the likeliest at any temperature", rows(ROW, OTHER, THIRD, temperature=9.0, top_k=1),
            token_ids(1, 4, 0), "the contract: among one",
        ),
        Case(
            "property", "one row of three equally likely tokens, drawn 200 times", rows([2.0, 2.0, 2.0]),
            lambda **given: {"different tokens drawn": [0, 1, 2]}, CONTRACT, seen,
        ),
        Case(
            "property", "temperature 0 with top_k", rows(ROW, OTHER, temperature=0.0, top_k=3), token_ids(1, 4),
            "the contract: the likeliest",
        ),
        Case("property", "a temperature of -1", rows(ROW, temperature=-1.0), refused, CONTRACT, whether_refused),
        Case("property", "a temperature of -0.001", rows(ROW, temperature=-0.001), refused, CONTRACT, whether_refused),
        Case("property", "top_k of 0", rows(ROW, top_k=0), refused, CONTRACT, whether_refused),
        Case("property", "top_k of -1", rows(ROW, top_k=-1), refused, CONTRACT, whether_refused),
        Case(
            "property", "a tiny temperature takes the likeliest, even by a little",
            rows([2.0, 2.01, 1.0], [5.0, 4.0, 5.01], temperature=1e-4), token_ids(1, 2), "arithmetic: exp(-0.01 / 0.0001) = 4e-44",
        ),
        Case(
            "property", "large logits and a small temperature", rows([1e4, -1e4, 9e3], [-1e4, 0.0, -9e3], temperature=1e-3),
            token_ids(0, 1), "arithmetic: exp(-1000 / 0.001) = 0",
        ),
        Case(
            "property", "large logits in float16, which ends at 65,504, and a small temperature",
            rows([6e4, -6e4, 5e4], [0.0, 300.0, -300.0], dtype=torch.float16, temperature=1e-3), token_ids(0, 1),
            "arithmetic: exp(-300 / 0.001) = 0",
        ),
        Case("property", "top_k of 0 at temperature 0", rows(ROW, temperature=0.0, top_k=0), refused, CONTRACT, whether_refused),
        Case("property", "top_k of -1 at temperature 0", rows(ROW, temperature=0.0, top_k=-1), refused, CONTRACT, whether_refused),
        Case("property", "a temperature of -1 with top_k 1", rows(ROW, temperature=-1.0, top_k=1), refused, CONTRACT, whether_refused),
        Case(
            "property", "logits that require no gradient do not afterwards", rows(ROW),
            lambda **given: {"logits.requires_grad afterwards": False}, "the contract: left unchanged", left_as_it_was,
        ),
        Case(
            "property", "a vocabulary of 40,000, and an id above 32,767",
            lambda: {"logits": torch.zeros(2, 40_000).index_fill(1, torch.tensor([39_999]), 90.0), "temperature": 0.5},
            token_ids(39_999, 39_999), "arithmetic: 39,999 * exp(-180) = 3e-74",
        ),
        Case(
            "property", "top_k 2 of five, three of which tie for the second place", many([2.0, 1.0, 1.0, 1.0, 0.0]),
            lambda **given: {"the likeliest is drawn": True, "one that ties is drawn": True, "a less likely one is drawn": False},
            "the contract: one of those that tie, or all", ties,
        ),
        odds_case(
            "top_k 2 of logits log(3), log(3), log(2) and log(1)", [3, 3, 2, 1], [0.5, 0.5, 0, 0],
            "arithmetic: two tokens tie for two places", "property", top_k=2,
        ),
        Case(
            "property", "a logit of minus infinity is never drawn",
            many([0.0, -math.inf, math.log(3), -math.inf], top_k=3, temperature=2.0),
            lambda **given: results(torch.tensor([[1 / (1 + 3**0.5), 0, 3**0.5 / (1 + 3**0.5), 0]])),
            "arithmetic: exp(-inf) = 0, and 1 to sqrt(3)", frequencies, atol=0.0125,
        ),
        Case(
            "property", "a temperature of 1e-6, and logits that lie as near to each other",
            many([0.0, 1e-6 * math.log(3)], temperature=1e-6),
            lambda **given: results(torch.tensor([[0.25, 0.75]])), "arithmetic: 1 to 3", frequencies, atol=0.0125,
        ),
        Case(
            "property", "bfloat16 logits of 100 and 100.5 at temperature 0.3",
            lambda: (given := many([100.0, 100.5], temperature=0.3)()) | {"logits": given["logits"].bfloat16()},
            lambda **given: results(torch.tensor([[0.0, 0.5 / 0.3]]).softmax(-1)),
            "arithmetic: 1 to exp(0.5 / 0.3); in bfloat16 333.3 and 335 are 334 and 336", frequencies, atol=0.0125,
        ),
        Case(
            "property", "1,000 equally likely tokens in bfloat16",
            lambda: {"logits": torch.zeros(4_000, 1_000, dtype=torch.bfloat16), "generator": Generator().manual_seed(3)},
            lambda **given: {"share of ids from 500 on": torch.tensor(0.5, dtype=torch.float64)},
            "arithmetic: half of them, with a standard deviation of 0.008 in 4,000 draws", upper_half, atol=0.04,
        ),
        Case(
            "property", "a generator decides, and no other source", rows(*[ROW] * 97),
            of_generators(**{"torch's default generator was used": False}), CONTRACT, with_generator,
        ),
        Case(
            "property", "without a generator torch's default one decides", rows(*[ROW] * 97), of_generators(), CONTRACT,
            without_generator,
        ),
        frequency_case("temperature 1", many(ROW)),
        frequency_case("temperature 0.5", many(ROW, temperature=0.5)),
        frequency_case("temperature 3", many(ROW, temperature=3.0)),
        frequency_case("top_k 2", many(ROW, top_k=2)),
        frequency_case("top_k 3 at temperature 2, two rows of different logits", many(ROW, OTHER, top_k=3, temperature=2.0)),
        frequency_case("top_k 2, and a row whose logits are all below the other's", many(ROW, [logit - 10 for logit in OTHER], top_k=2)),
        frequency_case("top_k 4 of five", many(ROW, top_k=4)),
        frequency_case("top_k larger than the vocabulary", many(ROW, top_k=11)),
    ],
)
