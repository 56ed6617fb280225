"""Check of 03.corrupt_spans. Oracle: Python's `re` on a text with one letter for each token, in which noise is written in capitals: runs
of capitals are the spans. Beside it, the paper's own example, and the text that comes out when the spans are put back in their
places. Ids are whole numbers: results are compared exactly.
"""

import re

import torch

from shared.course.checking import Case, Check

from .pieces import CONTRACT, ids, refused

ORACLE = "Python's re: runs of capitals in a text with one letter for each token"
LISTED = "the contract: the second span gets sentinels[1]"
PAPER = "Raffel et al. 2019, figure 2"
SENTINELS = list(range(199, 189, -1))  # no letter of the cases is one of them
END = 1


def text(tokens: str, sentinels: list[int] = SENTINELS, end_id: int = END):
    """Arguments from letters: each is a token, a capital is noise."""
    return lambda: {
        "input_ids": torch.tensor([ord(letter.lower()) for letter in tokens], dtype=torch.int64),
        "noise": torch.tensor([letter.isupper() for letter in tokens], dtype=torch.bool), "sentinels": list(sentinels), "end_id": end_id,
    }  # fmt: skip


def numbers(tokens: list[int], noise: str, sentinels: list[int]):
    """Arguments from ids: a 1 in `noise` is noise."""
    return lambda: {
        "input_ids": ids(*tokens), "noise": torch.tensor([letter == "1" for letter in noise]), "sentinels": list(sentinels), "end_id": END,
    }  # fmt: skip


def both(inputs: str, targets: str, end_id: int = END):
    """Two results from letters, in which a digit i is sentinel i."""

    def read(letters: str):
        return ids(*(SENTINELS[int(letter)] if letter.isdigit() else ord(letter) for letter in letters), end_id)

    return lambda **given: {"inputs": read(inputs), "targets": read(targets)}


def by_re(input_ids, noise, sentinels, end_id):
    letters = "".join(chr(token + 0x1000 * cut) for token, cut in zip(input_ids.tolist(), noise.tolist(), strict=True))
    runs = re.findall("[\u1000-\u1fff]+", letters)
    rest = re.split("[\u1000-\u1fff]+", letters)
    inputs = [ord(letter) for letter in rest[0]]
    targets = []
    for sentinel, run, kept in zip(sentinels, runs, rest[1:], strict=False):
        inputs += [sentinel, *map(ord, kept)]
        targets += [sentinel, *(ord(letter) - 0x1000 for letter in run)]
    return {"inputs": ids(*inputs, end_id), "targets": ids(*targets, end_id)}


def random(length: int, seed: int, share: float):
    def given():
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(length, generator=generator) < share
        return {
            "input_ids": torch.randint(2, 50, (length,), generator=generator), "noise": noise, "sentinels": list(range(899, 799, -1)),
            "end_id": END,
        }  # fmt: skip

    return given


def put_back(function, input_ids, noise, sentinels, end_id):
    """The text that comes out when each sentinel of the input gives way to what stands behind it in the targets."""
    inputs, targets = function(input_ids, noise, sentinels, end_id)
    spans, current = {}, None
    for token in targets[:-1].tolist():
        if token in sentinels:
            current = spans[token] = []
        else:
            current.append(token)
    whole = [part for token in inputs[:-1].tolist() for part in spans.get(token, [token])]
    return {"text with the spans put back": whole, "tokens in all": len(inputs) + len(targets)}


def whole(input_ids, noise, sentinels, end_id):
    spans = int((noise & ~torch.cat([noise.new_tensor([False]), noise[:-1]])).sum())
    return {"text with the spans put back": input_ids.tolist(), "tokens in all": len(input_ids) + 2 * spans + 2}


def worked(title: str, tokens: str, inputs: str, targets: str, source: str = CONTRACT, **options) -> Case:
    return Case("worked example", title, text(tokens, **options), both(inputs, targets), source)


CHECK = Check(
    exercise="03.corrupt_spans",
    outputs=("inputs", "targets"),
    spoilt=("inputs", "targets"),
    cases=[
        Case("shape and dtype", "eleven tokens, two spans", text("abCDefghIJk"), by_re, CONTRACT),
        worked("one span of one token", "abCd", "ab0d", "0c"),
        worked("one span of three tokens: one sentinel", "abCDEf", "ab0f", "0cde", "the contract: a run is one span"),
        worked("thank you FOR INVITING me to your party LAST week", "tyFImopLw", "ty0mop1w", "0fi1l", PAPER),
        worked("a span at the beginning", "ABcd", "0cd", "0ab"),
        worked("a span at the end", "abCD", "ab0", "0cd"),
        worked("two spans with one token between them", "aBcDe", "a0c1e", "0b1d"),
        worked("no noise at all", "abc", "abc", ""),
        worked("nothing but noise", "ABC", "0", "0abc"),
        worked("an empty text", "", "", ""),
        Case(
            "worked example", "sentinels that count up", numbers([11, 12, 13, 14, 15], "01011", [20, 21, 22]),
            lambda **given: {"inputs": ids(11, 20, 13, 21, END), "targets": ids(20, 12, 21, 14, 15, END)}, LISTED,
        ),
        Case(
            "worked example", "sentinels in no order", numbers([11, 12, 13, 14, 15], "10101", [70, 7, 700]),
            lambda **given: {"inputs": ids(70, 12, 7, 14, 700, END), "targets": ids(70, 11, 7, 13, 700, 15, END)}, LISTED,
        ),
        Case(
            "worked example", "the ids 0 and the end token's among the tokens", numbers([0, 1, 0, 1, 0], "01100", [99, 98]),
            lambda **given: {"inputs": ids(0, 99, 1, 0, END), "targets": ids(99, 1, 0, END)}, CONTRACT,
        ),
        Case(
            "worked example", "a sentinel of 0, an end token of 0, and ids above 65,535",
            lambda: numbers([70_000, 65_536, 40_000], "010", [0, 70_001])() | {"end_id": 0},
            lambda **given: {"inputs": ids(70_000, 0, 40_000, 0), "targets": ids(0, 65_536, 0)}, CONTRACT,
        ),
        Case(
            "worked example", "the last token is kept, and is the end token", numbers([11, 12, 1], "010", [99, 98]),
            lambda **given: {"inputs": ids(11, 99, 1, END), "targets": ids(99, 12, END)}, "the contract: the end token ends both",
        ),
        Case(
            "worked example", "the last token is noise, and is the end token", numbers([11, 12, 1], "001", [99, 98]),
            lambda **given: {"inputs": ids(11, 12, 99, END), "targets": ids(99, 1, END)}, "the contract: the end token ends both",
        ),
        Case("property", "one span of three tokens and one sentinel", text("aBCDe", sentinels=[199]), both("a0e", "0bcd"), CONTRACT),
        Case("property", "no span and no sentinel", text("abc", sentinels=[]), both("abc", ""), CONTRACT),
        Case("property", "three spans and two sentinels", text("AbCdE", sentinels=[199, 198]), refused, CONTRACT),
        Case("property", "one span and no sentinel", text("abC", sentinels=[]), refused, CONTRACT),
        Case("property", "as many sentinels as spans", text("AbC", sentinels=[199, 198]), both("0b1", "0a1c"), CONTRACT),
        Case("property", "the spans, put back, give the text", random(101, 3, 0.3), whole, "arithmetic: nothing is lost", put_back),
        Case("oracle", "101 tokens, 15 % of them noise", random(101, 5, 0.15), by_re, ORACLE),
        Case("oracle", "97 tokens, 60 % of them noise", random(97, 7, 0.6), by_re, ORACLE),
    ],
)
