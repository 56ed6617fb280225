"""Check of 11.sequence_log_probs. Oracles: torch's cross_entropy, which adds up what an answer's tokens cost, an answer at a time; torch's
own distribution of whole answers, enumerated; numpy.add.at.

Tolerances. float64: 1e-12 of sums of a few dozen numbers around 1. float32: 1e-6, and exactly where every partial sum is a multiple
of 2^-7 below 2^10.
"""

import itertools

import numpy
import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ARITHMETIC, CONTRACT, as_leaves, cases_of, randn, with_gradients

NUMPY = "numpy.add.at: one number after the other, to the place that its document says"
TORCH = "torch: cross_entropy of each answer's tokens, summed, times -1"
PRODUCTS = "torch: the probabilities of an answer's tokens, multiplied; over all answers they add up to 1"
F_, T_ = False, True


def of(numbers, counted, documents, count, dtype=torch.float64):
    return lambda: {"token_log_probs": torch.tensor(numbers, dtype=dtype), "counted": torch.tensor(counted, dtype=torch.bool),
                    "documents": torch.tensor(documents), "count": count}  # fmt: skip


def drawn(lengths, count=None, prompt=1, seq=None, dtype=torch.float64, scale=1.0, seed=1):
    """Rows of sequences with these lengths, one behind the other, padding at the end; the first tokens of each are its prompt."""

    def given():
        width = seq or max([1, *(sum(row) for row in lengths)])
        documents = torch.full((len(lengths), width), -1)
        counted = torch.zeros(len(lengths), width, dtype=torch.bool)
        for row, own in enumerate(lengths):
            for number, length in enumerate(own):
                start = sum(own[:number])
                documents[row, start : start + length] = number
                counted[row, start + prompt : start + length] = True
        numbers = -scale * randn(len(lengths), width, seed=seed).abs()
        most = max([0, *(len(row) for row in lengths)])
        return {"token_log_probs": numbers.to(dtype), "counted": counted, "documents": documents, "count": count or most}

    return given


def spoiled(given, *values):
    """What does not count, filled with numbers that are none, by turns."""

    def made():
        arguments = given()
        left = (~arguments["counted"]).nonzero()
        for number, (row, column) in enumerate(left.tolist()):
            arguments["token_log_probs"][row, column] = values[number % len(values)]
        return arguments

    return made


def changed(given, value, *places):
    def made():
        arguments = given()
        for row, column in places:
            arguments["token_log_probs"][row, column] = value
        return arguments

    return made


def summed(function, **given):
    leaves = as_leaves(given, "token_log_probs")
    return with_gradients(function(**given | leaves), leaves, name="sums")


def by_numpy(token_log_probs, counted, documents, count):
    """The sums, and the gradient: each number that counts gets what flows to its sum, every other one 0."""
    wide = torch.promote_types(token_log_probs.dtype, torch.float32)
    rows, columns = counted.nonzero(as_tuple=True)
    places = rows.numpy(), documents[rows, columns].numpy()
    sums = numpy.zeros((len(token_log_probs), count))
    numpy.add.at(sums, places, token_log_probs[rows, columns].double().numpy())
    flow, back = randn(len(token_log_probs), count, seed=17, dtype=wide), torch.zeros_like(token_log_probs)
    back[rows, columns] = flow[places].to(back.dtype)
    return {"sums": torch.from_numpy(sums).to(wide), "gradient of token_log_probs": back}


def value(function, **given):
    return {"sums": function(**given)}


def only_sums(**given):
    return {"sums": by_numpy(**given)["sums"]}


def answer(*rows):
    return lambda token_log_probs, **_: {"sums": torch.tensor(rows, dtype=token_log_probs.dtype)}


def strided():
    made = drawn([[3, 2, 4], [5, 4]])()
    return {name: value.T.contiguous().T if isinstance(value, torch.Tensor) else value for name, value in made.items()}


def interleaved():
    """Nothing says that the tokens of a sequence stand together."""
    made = drawn([[4, 4, 4], [6, 5]], prompt=0)()
    order = torch.tensor([0, 8, 4, 1, 9, 5, 2, 10, 6, 3, 11, 7])
    return {name: value[:, order] if isinstance(value, torch.Tensor) else value for name, value in made.items()}


def with_gaps():
    """Numbers that no token has: 1 in the first row, 0 in the second, and 3 in neither."""
    made = drawn([[4, 5], [3, 3]], count=5)()
    made["documents"] = made["documents"].where(made["documents"] != 1, torch.tensor([[2], [4]]))
    made["documents"][1] = made["documents"][1].where(made["documents"][1] != 0, 1)
    return made


def in_parts(function, token_log_probs, counted, documents, count, cut):
    """Two ranks with a part of the columns each: sums of parts, added up."""
    halves = [[tensor[:, own] for tensor in (token_log_probs, counted, documents)] for own in (slice(cut), slice(cut, None))]
    left, right = (function(*half, count) for half in halves)
    return {"sums": left + right}


def in_rows(function, token_log_probs, counted, documents, count, cut):
    """Two micro-batches with a part of the rows each."""
    parts = [[tensor[own] for tensor in (token_log_probs, counted, documents)] for own in (slice(cut), slice(cut, None))]
    return {"sums": torch.cat([function(*part, count) for part in parts])}


def whole(cut, **given):
    return only_sums(**given)


def of_logits(function, logits, targets, documents, count):
    """The log-probabilities of targets under logits, as an objective hands them over."""
    leaf = logits.clone().requires_grad_()
    counted = targets != -100
    logs = leaf.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return with_gradients(function(logs, counted, documents, count), {"logits": leaf}, name="sums")


def by_cross_entropy(logits, targets, documents, count):
    leaf, rows = logits.clone().requires_grad_(), []
    for scores, wanted, numbers in zip(leaf, targets, documents, strict=True):
        own = [(scores[numbers == number], wanted[numbers == number]) for number in range(count)]
        rows.append(torch.stack([-F.cross_entropy(*each, reduction="sum") for each in own]))
    return with_gradients(torch.stack(rows), {"logits": leaf}, name="sums")


def chats():
    made = drawn([[5, 7, 3, 4], [9, 8], [19]])()
    targets = torch.randint(11, made["counted"].shape, generator=torch.Generator().manual_seed(5)).where(made["counted"], -100)
    return {"logits": 2 * randn(*targets.shape, 11, seed=6), "targets": targets, "documents": made["documents"], "count": 4}


def all_answers(function, table):
    """Every answer of 3 tokens out of 3, each a sequence of one row."""
    answers = torch.tensor(list(itertools.product(range(3), repeat=3)))
    before = torch.cat([torch.full((len(answers), 1), 3), answers[:, :-1]], dim=1)
    logs = table.log_softmax(-1)[before, answers]
    documents = torch.arange(len(answers)).unsqueeze(1).expand_as(answers)
    sums = function(logs.view(1, -1), torch.ones(1, logs.numel(), dtype=torch.bool), documents.reshape(1, -1), len(answers))
    return {"probabilities": sums.exp(), "their sum": sums.exp().sum()}


def multiplied(table):
    p = table.softmax(-1)
    return {"probabilities": torch.einsum("a,ab,bc->abc", p[3], p[:3], p[:3]).reshape(1, -1), "their sum": torch.tensor(1.0).double()}


def given_sizes(function):
    """With room for as many sequences as there are tokens; [batch, seq, count] would be 96 times as large."""
    sizes = {
        name: drawn([[seq // answers] * answers] * batch, count=count, prompt=0, seq=seq, dtype=torch.float32)()
        for name, batch, seq, answers, count in (
            ("first", 5, 96, 4, 96), ("50 rows", 50, 96, 4, 96), ("960 tokens", 5, 960, 4, 96), ("48 answers in a row", 5, 96, 48, 96),
            ("room for 200 sequences", 5, 96, 4, 200))
    }  # fmt: skip
    return cost(function, 12.0, 5 * 96 * 4, sizes)


case = cases_of(by_numpy, NUMPY, summed)


def example(title, given, *rows, source=ARITHMETIC):
    return Case("worked example", title, given, answer(*rows), source, rtol=1e-12)


ROWS = [[3, 2, 4], [5, 4], [1], [9]]
INF = torch.inf

CHECK = Check(
    exercise="11.sequence_log_probs",
    outputs=("sums",),
    spoilt=("sums", "gradients through sums"),
    cases=[
        case("shape and dtype", "float32 [4, 9] to [4, 3]", drawn(ROWS, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16 [2, 9], with room for 9 sequences", drawn(ROWS[:2], count=9, dtype=torch.bfloat16),
             source=CONTRACT),
        case("shape and dtype", "float64 [4, 9] to [4, 5]", drawn(ROWS, count=5), source=CONTRACT),
        example("the contract's", of([[-9.0, -1.0, -2.0, -9.0, -4.0, -INF]], [[F_, T_, T_, F_, T_, F_]], [[0, 0, 0, 1, 1, -1]], 3),
                [-3.0, -4.0, 0.0], source=CONTRACT),
        example("every digit is another token: 0 and 1 are the prompts', the last is padding",
                of([[-1.0, -10.0, -100.0, -1000.0, -1e4, -1e5, -1e6]], [[F_, T_, T_, F_, T_, T_, F_]], [[0, 0, 0, 1, 1, 1, -1]], 2),
                [-110.0, -110000.0]),
        example("two rows, whose sequences are numbered from 0 in each", of(
            [[-1.0, -10.0], [-100.0, -1000.0]], [[T_, T_], [T_, T_]], [[0, 1], [0, 0]], 2), [-1.0, -10.0], [-1100.0, 0.0]),
        example("an answer in two parts, with a turn of the user's between", of(
            [[-1.0, -10.0, -100.0, -1000.0, -1e4]], [[F_, T_, F_, T_, T_]], [[0, 0, 0, 0, 0]], 1), [-11010.0]),
        case("property", "rows of 3, 2, 1 and 1 sequences", drawn(ROWS)),
        case("property", "... with longer prompts", drawn(ROWS, prompt=2)),
        case("property", "... without prompts: every token counts", drawn(ROWS, prompt=0)),
        case("property", "room for more sequences than tokens", drawn(ROWS, count=13)),
        case("property", "room for as many sequences as rows", drawn(ROWS, count=4)),
        case("property", "one sequence in a row, without padding", drawn([[5], [5]])),
        case("property", "one token in a row", drawn([[1], [1]], prompt=0)),
        case("property", "no rows", lambda: {name: value[:0] if isinstance(value, torch.Tensor) else value
                                             for name, value in drawn(ROWS)().items()}),
        case("property", "a row of padding alone", drawn([[3, 2], [], [4]])),
        case("property", "no token counts at all", drawn([[3, 2], [4]], prompt=9)),
        case("property", "-inf where a token does not count", spoiled(drawn(ROWS), -INF)),
        case("property", "NaN and infinities where a token does not count", spoiled(drawn(ROWS), torch.nan, INF, -INF)),
        case("property", "-inf at a token that counts: an impossible answer, and its neighbours as they were",
             changed(drawn(ROWS), -INF, (0, 1), (1, 6))),
        case("property", "NaN at a token that counts is seen, in its sequence alone", changed(drawn(ROWS), torch.nan, (0, 4))),
        case("property", "log-probabilities of 0 and of -1000", changed(changed(drawn(ROWS), 0.0, (0, 1)), -1000.0, (1, 2), (1, 3))),
        case("property", "log-probabilities above 0, as densities have them", lambda: drawn(ROWS)() | {
            "token_log_probs": randn(4, 9, seed=8)}),
        case("property", "the tokens of a sequence do not stand together", interleaved),
        case("property", "numbers that no token of a row has, and one that none has at all", with_gaps),
        case("property", "tensors that are not contiguous", strided),
        case("property", "bfloat16, 300 tokens of -1.0078125, added up in float32", lambda: drawn([[301]], dtype=torch.bfloat16)() | {
            "token_log_probs": torch.full((1, 301), -1.0078125).bfloat16()}, only_sums, ARITHMETIC, value, 0.0),
        case("property", "float16, whose largest number is 65,504: a sum of -100,000", lambda: drawn([[101], [101]])() | {
            "token_log_probs": torch.full((2, 101), -1000.0).half()}, only_sums, ARITHMETIC, value, 0.0),
        case("property", "gradients in bfloat16", drawn(ROWS, dtype=torch.bfloat16), tolerance=1e-6),
        case("property", "float32, sums of thousandths 400 tokens behind a sum of 1,600",
             changed(drawn([[400, 3, 2, 400, 4]], dtype=torch.float32, scale=5.0), -0.0009765625, (0, 401), (0, 402), (0, 404)),
             tolerance=2e-6),
        case("oracle", "log-probabilities of a model's logits, with gradients", chats, by_cross_entropy, TORCH, of_logits),
        case("oracle", "all 27 answers of a policy over 3 tokens", lambda: {"table": randn(4, 3, seed=9)}, multiplied, PRODUCTS,
             all_answers),
        case("oracle", "7 rows of up to 13 sequences", drawn(
            [[2 + (3 * row + number) % 5 for number in range(13 - row)] for row in range(7)])),
        case("two ranks", "columns 0 to 6, and the others", lambda: drawn(ROWS)() | {"cut": 7}, whole, CONTRACT, in_parts),
        case("two ranks", "rows 0 to 2, and the others", lambda: drawn(ROWS)() | {"cut": 3}, whole, CONTRACT, in_rows),
        case("budget", "more rows, tokens and answers, and memory, in tensors like `token_log_probs`", dict, lambda: within(12.0), CONTRACT,
             given_sizes),
    ],
)  # fmt: skip
