"""Stage 1 of build 01: documents on two sides, and windows of text."""

import math
import zlib
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import TEXT, WITHIN, Results, budget, generator, text_of
from .watching import Watch

SAYS = TEXT.format(1)


def documents_of(count: int, seed: int = 0) -> list[bytes]:
    """Documents of 1 to 30 letters, and their number, so that no two are equal."""
    sizes = torch.randint(1, 30, (count,), generator=generator(seed)).tolist()
    letters = bytes(text_of(sum(sizes), seed, least=97).clamp(max=122).tolist())
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [b"%d %b" % (number, letters[end - size : end]) for number, (end, size) in enumerate(zip(ends, sizes, strict=True))]


def sides(adapters: Any, documents: list[bytes], one_in: int) -> tuple[list[bytes], list[bytes]]:
    """The documents on both sides, read back from the texts."""
    training, held_out = adapters.split(list(documents), one_in)
    return bytes(training.tolist()).split(b"\0")[:-1], bytes(held_out.tolist()).split(b"\0")[:-1]


def form_case() -> Case:
    documents = documents_of(40)

    def observe(adapters: Any, **_: Any) -> Results:
        both = adapters.split(list(documents), 3)
        found = {"texts": len(both), "dtypes": [str(text.dtype) for text in both], "dimensions": [text.dim() for text in both]}
        return found | {"bytes in all": sum(len(text) for text in both), "zeros": sum(int((text == 0).sum()) for text in both)}

    sizes = sum(map(len, documents)) + len(documents)
    expected = {"texts": 2, "dtypes": ["torch.uint8"] * 2, "dimensions": [1, 1], "bytes in all": sizes, "zeros": 40}
    given = {"documents": 40, "one_in": 3}
    return Case("property", "two texts, with a 0 after each document", lambda: given, lambda **_: expected, SAYS, observe)


def order_case() -> Case:
    documents = documents_of(200, seed=1)

    def observe(adapters: Any, **_: Any) -> Results:
        training, held_out = sides(adapters, documents, 4)
        place = {document: number for number, document in enumerate(documents)}
        numbers = [[place.get(document, -1) for document in side] for side in (training, held_out)]
        return {"every document once": sorted(sum(numbers, [])) == list(range(200)), "in order": [side == sorted(side) for side in numbers]}

    expected = {"every document once": True, "in order": [True, True]}
    return Case("property", "whole documents, in their order", lambda: {"documents": 200, "one_in": 4}, lambda **_: expected, SAYS, observe)


def share_case(title: str, one_in: int) -> Case:
    """1,200 documents: within six standard deviations of the share."""
    documents, wanted = documents_of(1200, seed=2), 1200 / one_in
    allowed = 6 * math.sqrt(wanted * (1 - 1 / one_in))

    def observe(adapters: Any, **_: Any) -> Results:
        held_out = len(sides(adapters, documents, one_in)[1])
        return {"held out": f"about {wanted:.0f}" if abs(held_out - wanted) < allowed else f"{held_out} of 1200"}

    given = {"documents": 1200, "one_in": one_in}
    return Case("property", title, lambda: given, lambda **_: {"held out": f"about {wanted:.0f}"}, SAYS, observe)


def content_case() -> Case:
    """Other documents before, between and behind, another order, and the same document twice: each stays on its side."""
    documents, others = documents_of(120, seed=3), [b"other " + each for each in documents_of(60, seed=4)]

    def observe(adapters: Any, **_: Any) -> Results:
        first = set(sides(adapters, documents, 3)[1])
        trials = {
            "others before them": others + documents,
            "others between them": [each for pair in zip(documents, others * 2, strict=True) for each in pair],
            "the reverse order": documents[::-1],
            "half of them": documents[::2],
        }
        found = {}
        for title, given in trials.items():
            training, held_out = sides(adapters, given, 3)
            moved = [each for each in held_out if each in documents and each not in first] + [each for each in training if each in first]
            found[f"documents that changed sides with {title}"] = len(moved)
        training, held_out = sides(adapters, documents * 2, 3)
        return found | {"documents on both sides": len(set(training) & set(held_out))}

    names = ("others before them", "others between them", "the reverse order", "half of them")
    expected = {f"documents that changed sides with {name}": 0 for name in names} | {"documents on both sides": 0}
    return Case("property", "the content alone decides", lambda: {"documents": 120, "one_in": 3}, lambda **_: expected, SAYS, observe)


def process_case() -> Case:
    """Python salts `hash` of bytes and texts anew in each process. Two salts stand for two processes here."""
    documents, name = documents_of(120, seed=3), "documents that changed sides in another process"

    def observe(adapters: Any, **_: Any) -> Results:
        held_out = []
        for salt in (b"one", b"another"):
            vars(adapters.module)["hash"] = lambda value, salt=salt: zlib.crc32(salt + repr(value).encode())
            try:
                held_out.append(set(sides(adapters, documents, 3)[1]))
            finally:
                del vars(adapters.module)["hash"]
        return {name: len(held_out[0] ^ held_out[1])}

    return Case("property", "the same in every process", lambda: {"documents": 120, "one_in": 3}, lambda **_: {name: 0}, SAYS, observe)


def windows_case(title: str, size: int, rows: int, length: int, seed: int) -> Case:
    """A text in which each run of two bytes is somewhere else, so that the place of a window is known."""
    text = pairs_text(size)

    def observe(adapters: Any, **_: Any) -> Results:
        inputs, targets = adapters.windows(text, rows, length, generator(seed))
        whole = torch.cat([inputs, targets[:, -1:]], dim=1)
        known = {tuple(run) for run in text.long().unfold(0, length + 1, 1).tolist()}
        found = {"shapes": [list(inputs.shape), list(targets.shape)], "dtypes": [str(inputs.dtype), str(targets.dtype)]}
        found["rows that are no run of the text"] = sum(tuple(row) not in known for row in whole.tolist())
        return found | {"targets are the bytes after": bool(torch.equal(inputs[:, 1:], targets[:, :-1]))}

    expected = {"shapes": [[rows, length]] * 2, "dtypes": ["torch.int64"] * 2, "rows that are no run of the text": 0}
    given = {"bytes": size, "rows": rows, "length": length}
    return Case("property", title, lambda: given, lambda **_: expected | {"targets are the bytes after": True}, SAYS, observe)


def pairs_text(size: int) -> torch.Tensor:
    """Bytes i, then i squared, and so on: no two places look alike over three bytes."""
    numbers = torch.arange(size)
    return ((numbers * 37 + numbers // 256 * 11 + (numbers % 7) ** 2) % 256).to(torch.uint8)


def places_case(title: str, size: int, length: int, rows: int) -> Case:
    """How often each place is drawn: about equally often, the first and the last too, within six standard deviations."""
    places = size - length
    text = torch.arange(size).to(torch.uint8)

    def observe(adapters: Any, **_: Any) -> Results:
        inputs, _ = adapters.windows(text, rows, length, generator(5))
        drawn = torch.bincount(inputs[:, 0], minlength=places)
        odd = [f"place {place}: {int(times)} of {rows}" for place, times in enumerate(drawn) if abs(int(times) - rows / places) > spread]
        return {"places that are drawn too seldom or too often": odd}

    spread = 6 * math.sqrt(rows / places)
    given = {"bytes": size, "length": length, "rows": rows, "places": places}
    return Case("property", title, lambda: given, lambda **_: {"places that are drawn too seldom or too often": []}, SAYS, observe)


def independent_case() -> Case:
    """Rows that follow one another: every pair of 5 places comes up among 1,000 of them (one is missing in 10^16 tries)."""
    text, name = torch.arange(9).to(torch.uint8), "pairs of places that never come up in two rows that follow one another"

    def observe(adapters: Any, **_: Any) -> Results:
        first = adapters.windows(text, 2000, 4, generator(6))[0][:, 0].view(-1, 2)
        return {name: 25 - len({tuple(pair) for pair in first.tolist()})}

    given = {"bytes": 9, "length": 4, "rows": 2000, "places": 5}
    return Case("property", "rows are drawn independently", lambda: given, lambda **_: {name: 0}, SAYS, observe)


def source_case() -> Case:
    """The generator alone decides: equal states, equal windows; it moves on; the global generator is neither used nor changed."""
    text = text_of(5000, seed=6)

    def observe(adapters: Any, **_: Any) -> Results:
        draw = lambda source: torch.stack(adapters.windows(text, 4, 9, source))  # noqa: E731
        torch.manual_seed(1)
        before, source = torch.get_rng_state(), generator(8)
        first, second = draw(source), draw(source)
        untouched = bool(torch.equal(before, torch.get_rng_state()))
        torch.manual_seed(2)
        again = draw(generator(8))
        return {
            "the same generator again": bool(torch.equal(first, again)),
            "the next windows are others": not torch.equal(first, second),
            "another seed gives others": not torch.equal(first, draw(generator(9))),
            "the global generator is as it was": untouched,
        }

    names = ("the same generator again", "the next windows are others", "another seed gives others", "the global generator is as it was")
    return Case("property", "randomness", lambda: {"rows": 4, "length": 9}, lambda **_: dict.fromkeys(names, True), SAYS, observe)


def text_budget_case() -> Case:
    name = "bytes of tensors at the peak"

    def observe(adapters: Any, **_: Any) -> Results:
        text = torch.zeros(4_000_000, dtype=torch.uint8)
        with Watch() as watch:
            adapters.windows(text, 8, 32, generator(0))
        return {name: budget(watch.most, 200_000, "bytes")}

    given = {"bytes of the text": 4_000_000, "rows": 8, "length": 32}
    return Case("budget", "a large text is not copied", lambda: given, lambda **_: {name: WITHIN}, SAYS, observe)


BATCHES = (
    form_case(),
    order_case(),
    share_case("one in twenty", 20),
    share_case("one in two", 2),
    content_case(),
    process_case(),
    windows_case("one window", 300, 1, 5, 0),
    windows_case("several windows", 2000, 16, 40, 1),
    windows_case("windows of one byte", 250, 7, 1, 2),
    windows_case("one place for a window", 33, 3, 32, 3),
    places_case("every place, the first and the last too", 12, 4, 4000),
    places_case("two places", 9, 7, 400),
    independent_case(),
    source_case(),
    text_budget_case(),
)
