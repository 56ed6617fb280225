"""Check of 12.draw_tokens. Oracles: exponentials of Python's own, cut by top-k and then by top-p and laid side by side, which equal
transformers' warpers in this order (`tests/parity/test_check_oracles.py`); and `fractions`, whose probabilities are exact.

Tolerances. Tokens are compared exactly; no place is within 1e-9 of an edge, but where the edge is exact. Log-probabilities in float64:
1e-12 of numbers up to 50.
"""

import math
from fractions import Fraction
from itertools import accumulate

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ARITHMETIC, CONTRACT, cases_of, randn
from .pieces import left_behind, nothing

EXPONENTIALS = "Python's own exponentials, cut by top-k and then by top-p, over their sum"
FRACTIONS = "exact fractions, laid side by side"
INF = torch.inf
ALMOST = 1 - 2**-53  # the largest float64 below 1


def of(logits, uniform, dtype=torch.float64, **more):
    def given():
        places = torch.tensor(uniform, dtype=torch.float64)
        return {"logits": torch.tensor(logits, dtype=dtype), "uniform": places} | more

    return given


def odds(weights, uniform, **more):
    """One row of odds such as 5, 3, 2, drawn from at several places."""
    return lambda: {"logits": torch.tensor(weights, dtype=torch.float64).log().repeat(len(uniform), 1),
                    "uniform": torch.tensor(uniform, dtype=torch.float64)} | more  # fmt: skip


def drawn(rows, vocab, dtype=torch.float64, loud=2.0, seed=1, places=torch.float32, **more):
    def given():
        uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        return {"logits": (loud * randn(rows, vocab, seed=seed)).to(dtype), "uniform": uniform.to(places)} | more

    return given


def by_exponentials(logits, uniform, temperature=1.0, top_k=None, top_p=None):
    tokens, logs = [], []
    for row, place in zip(logits.double().tolist(), uniform.double().tolist(), strict=True):
        left = shares_of(row, temperature, top_k, top_p)
        passed, token = left[0], 0
        while passed <= place:
            token, passed = token + 1, passed + left[token + 1]
        tokens.append(token)
        logs.append(math.log(left[token]))
    return {"tokens": torch.tensor(tokens), "log_probs": torch.tensor(logs, dtype=torch.float64)}


def shares_of(row, temperature=1.0, top_k=None, top_p=None):
    """The probability of each token. top-k keeps what ties for its last place, top-p a token before which less than top_p has passed."""
    likeliest = sorted(range(len(row)), key=lambda token: -row[token])  # of equally likely ones the first comes first
    peak = max(row)
    weights = [math.exp((logit - peak) / temperature) for logit in row]
    if top_k:
        least = row[likeliest[min(top_k, len(row)) - 1]]
        weights = [weight if logit >= least else 0.0 for logit, weight in zip(row, weights, strict=True)]
    if top_p:
        before, total = 0.0, math.fsum(weights)
        for token in likeliest:
            before, weights[token] = before + weights[token], weights[token] if before < top_p * total else 0.0
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def by_fractions(weights, kept=None):
    """Of weights whose probabilities are known exactly: the tokens at the places, of those that are kept."""
    left = [Fraction(weight) if kept is None or token in kept else Fraction(0) for token, weight in enumerate(weights)]

    def expected(uniform, **_):
        total, edges = sum(left), list(accumulate(left))
        tokens = [next(token for token, edge in enumerate(edges) if edge > Fraction(place) * total) for place in uniform.tolist()]
        logs = torch.tensor([float(left[token] / total) for token in tokens], dtype=torch.float64).log()
        return {"tokens": torch.tensor(tokens), "log_probs": logs}

    return expected


def answer(tokens, probabilities):
    return lambda **_: {"tokens": torch.tensor(tokens), "log_probs": torch.tensor(probabilities, dtype=torch.float64).log()}


def strided():
    made = drawn(5, 7, places=torch.float64)()
    return {"logits": made["logits"].T.contiguous().T, "uniform": torch.stack([made["uniform"], made["uniform"] / 2], dim=1)[:, 0]} | {
        "temperature": 0.8, "top_k": 5, "top_p": 0.9}  # fmt: skip


def row_by_row(function, logits, uniform, **more):
    each = [function(logits[row : row + 1], uniform[row : row + 1], **more) for row in range(len(logits))]
    return dict(zip(("tokens", "log_probs"), map(torch.cat, zip(*each, strict=True)), strict=True))


def shares(function, logits, count, **more):
    """How many of equally spaced places draw each token, and what all that can be drawn adds up to."""
    places = (torch.arange(count).double() + 0.5) / count
    tokens, logs = function(logits.repeat(count, 1), places, **more)
    found = {token: value for token, value in zip(tokens.tolist(), logs.exp().tolist(), strict=True)}
    counted = torch.bincount(tokens, minlength=logits.shape[1]).double() / count
    return {"share of each token": counted, "the probabilities of all that were drawn": sum(found.values())}


def shares_by_exponentials(logits, count, **more):
    reached = torch.tensor(shares_of(logits[0].tolist(), **more), dtype=torch.float64)
    return {"share of each token": reached, "the probabilities of all that were drawn": 1.0}


def given_sizes(function):
    cut = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    sizes = {name: drawn(rows, vocab, torch.float32, **cut)() for name, rows, vocab in
             (("first", 3, 500), ("40 rows", 40, 500), ("3,000 tokens", 3, 3000))}  # fmt: skip
    return cost(function, 16, 3 * 500 * 8, sizes)


def more_of_top_p(function):
    sizes = {f"top-p of {top_p}": drawn(3, 500, loud=0.5, top_p=top_p)() for top_p in (0.02, 0.98)}
    sizes |= {f"{rows} rows, top-k of {top_k}": drawn(rows, 300, top_k=top_k)() for rows, top_k in ((3, 2), (3, 200), (20, 200))}
    return cost(function, 1e9, 1, sizes)


case = cases_of(by_exponentials, EXPONENTIALS)


def example(title, given, tokens, probabilities, source=ARITHMETIC):
    return Case("worked example", title, given, answer(tokens, probabilities), source, rtol=1e-12, atol=1e-15)


def exact(title, weights, uniform, kept=None, **more):
    return Case("property", title, odds(weights, uniform, **more), by_fractions(weights, kept), FRACTIONS, rtol=1e-12, atol=1e-15)


FIVE = [0.5, 0.3, 0.2]
MIXED = [3, 1, 8, 1, 5, 2]  # of 20; by odds: 2, 4, 0, 5, 1, 3
PLACES = [0.013, 0.193, 0.331, 0.513, 0.687, 0.841, 0.973]
TAIL = [-41.0] * 30 + [0.0]  # each of the thirty has a probability of 1.6e-18
ALL = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}

CHECK = Check(
    exercise="12.draw_tokens",
    outputs=("tokens", "log_probs"),
    spoilt=("tokens", "log_probs"),
    cases=[
        case("shape and dtype", "float32 [5, 7]", drawn(5, 7, torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16, and all three", drawn(5, 11, torch.bfloat16, **ALL), source=CONTRACT),
        Case("shape and dtype", "float16, the likeliest", of([[1.0, 2.0]], [0.5], torch.float16, temperature=0.0), answer([1], [1.0]),
             CONTRACT),
        example("the contract's: 0.5 is passed, 0.5 + 0.3 is not", odds(FIVE, [0.6]), [1], [0.3], CONTRACT),
        example("the contract's with top-p: 0.625 and 0.375 are left", odds(FIVE, [0.6], top_p=0.6), [0], [0.625], CONTRACT),
        example("the contract's at temperature 0", odds(FIVE, [0.6], temperature=0.0), [0], [1.0], CONTRACT),
        example("four places between 0 and 1", odds([2, 5, 3], [0.0, 0.21, 0.69, 0.71]), [0, 1, 1, 2], [0.2, 0.5, 0.5, 0.3]),
        example("temperature 2 on odds of 9, 16, 4: square roots", odds([9, 16, 4], [0.3, 0.4, 0.8], temperature=2.0), [0, 1, 2],
                [3 / 9, 4 / 9, 2 / 9]),
        example("temperature 1/2 on odds of 1, 2, 3: squares", odds([1, 2, 3], [0.05, 0.3, 0.4], temperature=0.5), [0, 1, 2],
                [1 / 14, 4 / 14, 9 / 14]),
        example("top-k of 2 on odds of 2, 5, 3: 5 and 3 are left", odds([2, 5, 3], [0.0, 0.6, 0.64], top_k=2), [1, 1, 2],
                [0.625, 0.625, 0.375]),
        example("top-k of 2, then top-p of 0.6: 5/8 reaches it", odds([2, 5, 3], [0.0, 0.99], top_k=2, top_p=0.6), [1, 1], [1.0, 1.0]),
        example("temperature 1/2, then top-p of 0.8: 9/14 and 4/14", odds([1, 2, 3], [0.3, 0.4], temperature=0.5, top_p=0.8), [1, 2],
                [4 / 13, 9 / 13]),
        case("property", "7 rows of 11 tokens", drawn(7, 11)),
        case("property", "one row", drawn(1, 11)),
        case("property", "as many rows as tokens", drawn(6, 6, top_k=3)),
        case("property", "one token", of([[3.0], [-9.0]], [0.3, ALMOST], top_k=4, top_p=0.5)),
        case("property", "float32, computed in float64", drawn(40, 300, torch.float32, temperature=0.9)),
        case("property", "bfloat16, computed in float64", drawn(40, 300, torch.bfloat16, **ALL)),
        case("property", "float16, computed in float64", drawn(40, 300, torch.float16, **ALL)),
        case("property", "float16 and a low temperature: 60 / 0.0005 is more than float16 holds",
             of([[60.0, 59.9995, 59.0], [-60.0, 60.0, 1.0]], [0.9, 0.1], torch.float16, temperature=0.0005)),
        case("property", "places in float16", drawn(9, 11, torch.float32, places=torch.float16)),
        exact("the edge itself: a token begins where the one before ends", [1, 1], [0.0, 0.5, ALMOST]),
        case("property", "0.7 in float32 is below 0.7 in float64, where the first token ends", lambda: odds([7, 3], [0.7])() | {
            "uniform": torch.tensor([0.7])}, by_fractions([7, 3]), FRACTIONS),
        exact("the first two tokens may not be drawn, not even at 0", [0, 0, 3, 1], [0.0, 0.5, 0.76]),
        exact("a token between two may not be drawn", [1, 0, 1], [0.0, 0.5, 0.75]),
        exact("the last two tokens may not be drawn, not even just below 1", [3, 4, 3, 0, 0], [0.5, ALMOST]),
        exact("all but one may not be drawn", [0, 0, 5, 0], [0.0, 0.5, ALMOST], top_k=3, top_p=0.9),
        exact("just below 1, where the last token begins at 1 - 1e-14", [10**14 - 1, 1], [ALMOST, 1 - 2e-14]),
        case("property", "... of logits in float32, and the place in float64", of([[1.0, 1.0, -INF]], [ALMOST], torch.float32)),
        exact("just below 1, of 1,000 tokens whose sum is rounded", [3] * 1000, [0.0, 0.4995, ALMOST]),
        exact("just below 1, of 999 odds", list(range(1, 1000)), [ALMOST]),
        exact("... where the last two ids may not be drawn", [*range(1, 1000), 0, 0], [ALMOST]),
        exact("top-k just below 1: the last kept token is in the middle", [1, 7, 3, 2], [ALMOST, 0.0], {1, 2}, top_k=2),
        exact("top-k of 1", MIXED, PLACES, {2}, top_k=1),
        exact("top-k of 2", MIXED, PLACES, {2, 4}, top_k=2),
        exact("top-k of 4", MIXED, PLACES, {2, 4, 0, 5}, top_k=4),
        exact("top-k of 5: the fifth and sixth are as likely", MIXED, PLACES, {0, 1, 2, 3, 4, 5}, top_k=5),
        exact("top-k of 2, and four are as likely as the second", [4, 4, 1, 4, 9, 4], PLACES, {0, 1, 3, 4, 5}, top_k=2),
        exact("top-k of all there are", [3, 1, 8, 4, 5, 2], PLACES, top_k=6),
        exact("top-k of more than there are", MIXED, PLACES, top_k=50),
        case("property", "top-k of 2, where the third differs in the thirteenth digit", of([[5.0, 0.0, -1e-12]], [0.3], top_k=2),
             answer([0], [1 / (1 + math.exp(-5))]), ARITHMETIC),
        exact("top-k of more than may be drawn", [3, 0, 1, 0], [0.0, 0.7, 0.8], top_k=3),
        exact("a tiny top-p keeps the likeliest", MIXED, PLACES, {2}, top_p=1e-9),
        exact("... of equally likely ones the first", [2, 5, 5, 5], PLACES, {1}, top_p=1e-9),
        exact("top-p of 0.39: the likeliest, 0.4, reaches it", MIXED, PLACES, {2}, top_p=0.39),
        exact("top-p of 0.41: it takes the second as well", MIXED, PLACES, {2, 4}, top_p=0.41),
        exact("top-p of 0.79", MIXED, PLACES, {2, 4, 0}, top_p=0.79),
        exact("top-p of 0.92, of equally likely ones the first", MIXED, PLACES, {2, 4, 0, 5, 1}, top_p=0.92),
        exact("top-p of 0.99", MIXED, PLACES, top_p=0.99),
        exact("top-p of 1", MIXED, PLACES, top_p=1.0),
        exact("top-p of 1/2, which 1 of 2 reaches exactly", [1, 1], [0.0, 0.7], {0}, top_p=0.5),
        exact("... and by a billionth does not", [1, 1], [0.3, 0.7], top_p=0.5 + 1e-9),
        exact("top-p of 3/4, which 3 of 4 reach exactly", [1, 1, 1, 1], PLACES, {0, 1, 2}, top_p=0.75),
        exact("top-p of 0.4 among 100 that are equally likely", [1] * 100, PLACES, set(range(40)), top_p=0.3999),
        exact("top-k of 1, which keeps two, then top-p of 0.4, which keeps the first", [2, 5, 5], PLACES, {1}, top_k=1, top_p=0.4),
        exact("top-p of 0.99995, which 0.99999 reaches", [99999, 1], [ALMOST], {0}, top_p=0.99995),
        exact("top-k of 3, then top-p of 0.9 of what is left, 8 + 5 + 3", MIXED, PLACES, {0, 2, 4}, top_k=3, top_p=0.9),
        exact("top-k of 3, then top-p of 0.8: 13/16 reaches it, where 13/20 would not", MIXED, PLACES, {2, 4}, top_k=3, top_p=0.8),
        case("property", "top-p of 1 keeps tokens of probability 1e-18", of([TAIL] * 2, [2.42e-17, 0.5], top_p=1.0),
             lambda **given: by_exponentials(given["logits"], given["uniform"])),
        case("property", "rows that keep different numbers of tokens", lambda: {
            "logits": torch.tensor([0.1, 1.0, 5.0, 0.5]).double()[:, None] * randn(4, 13, seed=3),
            "uniform": torch.tensor([0.93, 0.5, 0.98, 0.07]).double(), "top_p": 0.7}),
        case("property", "temperature 0: the first of equal ones, at any place", of(
            [[1.0, 3.0, 3.0, 2.0], [-INF, -INF, -2.0, -2.0], [5.0, 5.0, 5.0, 5.0]], [0.0, 0.99, 0.7], temperature=0.0),
            answer([1, 2, 0], [1.0, 1.0, 1.0]), CONTRACT),
        case("property", "temperature 0 given as a whole number, with top-k and top-p",
             of([[1.0, 3.0, 2.0]], [0.99], temperature=0, top_k=2, top_p=0.5), answer([1], [1.0]), CONTRACT),
        case("property", "temperature 0: the likeliest of 300 in float16", drawn(5, 300, torch.float16, temperature=0.0),
             lambda logits, **_: {"tokens": logits.double().argmax(-1), "log_probs": torch.zeros(5).double()}, CONTRACT),
        case("property", "temperature 0.001", of([[1.0, 1.0005, 0.999], [0.0, -9.0, 0.0001]], [0.3, 0.5], temperature=0.001)),
        case("property", "temperature 1e-307, at which a logit of 90 overflows, and a difference does not",
             of([[90.0, 89.0, 90.0]], [0.7], temperature=1e-307), answer([2], [0.5]), CONTRACT),
        case("property", "... at which differences overflow as well", of(
            [[9000.0, -9000.0, 9000.0], [-9000.0, -9000.0, 5.0]], [0.7, 0.7], temperature=1e-307), answer([2, 2], [0.5, 1.0]), CONTRACT),
        case("property", "temperature 1e-9 on logits that differ by 1e-9: odds of 1 to e", of([[0.0, 1e-9], [1e-9, 0.0]], [0.3, 0.7],
             temperature=1e-9), tolerance=1e-9),
        case("property", "... and 1e-200 on logits that differ by 1e-200", of([[0.0, 1e-200]], [0.3], temperature=1e-200), tolerance=1e-9),
        case("property", "a temperature of 10^12, and a token that may not be drawn", of([[0.0, -INF]], [ALMOST], temperature=1e12),
             answer([0], [1.0]), CONTRACT),
        case("property", "a temperature of 100", drawn(7, 11, temperature=100.0)),
        case("property", "logits of thousands, and of minus thousands", of(
            [[5000.0, 5001.0, 4990.0], [-5000.0, -5001.0, -5003.0]], [0.4, 0.8])),
        case("property", "a shift of all logits changes nothing", lambda: {"logits": drawn(5, 9)()["logits"] + 1024.0,
             "uniform": drawn(5, 9)()["uniform"]} | ALL, lambda logits, **given: by_exponentials(logits - 1024.0, **given), CONTRACT,
             tolerance=1e-11),
        case("property", "each row alone is what it is among others", drawn(7, 11, **ALL), observe=row_by_row),
        case("property", "tensors that are not contiguous", strided),
        case("property", "torch's settings and random numbers", drawn(5, 7, **ALL), nothing, CONTRACT, left_behind),
        case("oracle", "200 rows of 97 tokens, a temperature", drawn(200, 97, temperature=1.3)),
        case("oracle", "... top-k", drawn(200, 97, top_k=12)),
        case("oracle", "... top-p", drawn(200, 97, top_p=0.85)),
        case("oracle", "3 rows of 5,000 tokens", drawn(3, 5000, loud=0.1)),
        case("oracle", "200 rows of 97, all three, in float32", drawn(200, 97, torch.float32, temperature=0.6, top_k=30, top_p=0.95)),
        case("oracle", "how often each token is drawn at 20,000 places", lambda: {
            "logits": randn(1, 9, seed=4), "count": 20_000, "temperature": 0.8, "top_k": 7, "top_p": 0.9}, shares_by_exponentials,
            observe=shares, tolerance=1e-4),
        case("budget", "more rows and tokens, and memory, in logits of float64", dict, lambda: within(16), CONTRACT, given_sizes),
        case("budget", "more that is kept", dict, lambda: within(1e9), CONTRACT, more_of_top_p),
    ],
)  # fmt: skip
