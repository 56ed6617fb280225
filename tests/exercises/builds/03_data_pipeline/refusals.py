"""Stage 9 of build 03: what cannot be right is refused, with the words that help, and files that are no text are reported by name."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from shared.course.checking import Case

from .loading import documents_of, taken
from .pieces import REFUSED, TEXT, Results, refusal
from .tokenizing import END


def refused_case(title: str, call: Callable[[Any], Any], *words: str) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        return {"result": refusal(lambda: call(adapters), *words)}

    return Case("property", title, lambda: {}, lambda **_: {"result": REFUSED}, TEXT.format(9), observe)


def accepted_case(title: str, call: Callable[[Any], Any], wanted: Any) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        return {"result": call(adapters)}

    return Case("property", title, lambda: {}, lambda **_: {"result": wanted}, TEXT.format(9), observe)


# Files that are no tokenizers


def loading(data: bytes) -> Callable[[Any], Any]:
    def call(adapters: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "strange.json")
            path.write_bytes(data)
            return adapters.load(path)

    return call


def words_alone() -> bytes:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made.to_str().encode()


# Loaders


def loader_of(adapters: Any, size: int = 2, rank: int = 0, ranks: int = 1, width: int = 8, documents: Any = None) -> object:
    return adapters.start(documents_of([5, 4, 3, 6, 7, 2, 9, 8]) if documents is None else documents, width, size, 1, rank, ranks)


def restoring(width: int, seed: int, documents: list[list[int]], word: str) -> Case:
    """A state of another loader is refused, and the loader goes on where it was."""
    own = documents_of([5, 4, 3, 6, 7, 2, 9, 8], 1)

    def observe(adapters: Any, **_: Any) -> Results:
        other, loader, alone = (adapters.start(*each) for each in ((documents, width, 2, seed), (own, 8, 2, 1), (own, 8, 2, 1)))
        taken(adapters, [other], 3)
        taken(adapters, [loader], 1)
        result = refusal(lambda: adapters.restore(loader, json.loads(json.dumps(adapters.state(other)))), word)
        return {"result": result, "goes on where it was": taken(adapters, [loader], 2) == taken(adapters, [alone], 3)[1:]}

    expected = lambda **_: {"result": REFUSED, "goes on where it was": True}  # noqa: E731
    return Case("property", f"a state of other {word}", lambda: {}, expected, TEXT.format(9), observe)


# Files of text

FILES = {
    "b.txt": "naïve\r\n漢字\n".encode(), "a.py": b"x = 1\n", "empty.txt": b"",
    "spaces.txt": b" \n\t\r\n", "latin.txt": "caf\u00e9 au".encode("latin-1"),
    "image.png": b"\x89PNG\r\n\x1a\n\x00\x00", "zeros.txt": b"text\x00text", "cut.txt": "naïve 漢".encode()[:-1], "no_end": b"last",
    "late.txt": b"a" * 70_000 + b"\xff" + b"a" * 10, "utf16.txt": "ab".encode("utf-16-le"),
}  # fmt: skip
REASONS = {
    "cut.txt": ("UTF-8", "7"), "empty.txt": ("empty",),
    "image.png": ("binary",), "late.txt": ("UTF-8", "70000"), "latin.txt": ("UTF-8", "3"),
    "spaces.txt": ("empty",), "utf16.txt": ("binary",), "zeros.txt": ("binary",),
}  # fmt: skip


def texts_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in FILES.items():
                Path(folder, name).write_bytes(data)
            Path(folder, "within").mkdir()
            Path(folder, "within", "c.txt").write_bytes(b"deeper")
            texts, refused = adapters.read_texts(Path(folder))
        found = {name: "as it must say" if all(word in refused.get(name, "") for word in words) else refused.get(name, "not refused")
                 for name, words in REASONS.items()}  # fmt: skip
        return {"texts": [f"{name}: {text!r}" for name, text in texts.items()], "names of those refused": list(refused), "reasons": found}

    def expected(**_: Any) -> Results:
        texts = [f"{name}: {FILES[name].decode()!r}" for name in ("a.py", "b.txt", "no_end")]
        return {"texts": texts, "names of those refused": sorted(REASONS), "reasons": dict.fromkeys(REASONS, "as it must say")}

    given = {"files": {name: repr(data[:20]) for name, data in FILES.items()}}
    return Case("worked example", "files of text, and others", lambda: given, expected, TEXT.format(9), observe)


def none_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        with tempfile.TemporaryDirectory() as folder:
            return {"result": [dict(each) for each in adapters.read_texts(Path(folder))]}

    return Case("worked example", "a folder without files", lambda: {}, lambda **_: {"result": [{}, {}]}, TEXT.format(9), observe)


TEXTS = ["low lower lowest"]
BAD_INPUT = (
    texts_case(),
    none_case(),
    refused_case("a vocabulary without room for the bytes", lambda a: a.train(TEXTS, 255), "255"),
    refused_case("one without room for the special tokens", lambda a: a.train(TEXTS, 257, [END, "<pad>"]), "257"),
    accepted_case("one that has just room", lambda a: len(a.vocabulary(a.train(TEXTS, 258, [END, "<pad>"]))), 258),
    refused_case("an empty special token", lambda a: a.train(TEXTS, 300, [END, ""]), "''"),
    refused_case("a special token twice", lambda a: a.train(TEXTS, 300, [END, "<pad>", END]), repr(END)),
    refused_case("an id behind the last", lambda a: a.decode(a.train(TEXTS, 258), [5, 258]), "258"),
    refused_case("an id below 0", lambda a: a.decode(a.train(TEXTS, 258), [5, -1]), "-1"),
    accepted_case("the last id", lambda a: repr(a.decode(a.train(["zz"], 257), [256])), repr(b"zz")),
    refused_case("a tokenizer that is no JSON", loading(b"{"), "strange.json"),
    refused_case("one that is binary", loading(b"\x89\xff\x00"), "strange.json"),
    refused_case("one that is other JSON", loading(b"[1, 2]"), "strange.json"),
    refused_case("one of another kind", loading(words_alone()), "strange.json"),
    refused_case("one whose pairs are of characters, not of bytes", loading(Tokenizer(models.BPE()).to_str().encode()), "strange.json"),
    refused_case("a document without a prediction", lambda a: a.pack([[1, 2, 3], [4, 5], [6]], 8), "2"),
    refused_case("a document without an id", lambda a: a.pack([[1, 2, 3], [], [4, 5]], 8), "1"),
    refused_case("rows of no position", lambda a: a.pack([[1, 2, 3]], 0), "width"),
    refused_case("no documents", lambda a: loader_of(a, documents=[]), "documents"),
    refused_case("a loader of rows of no position", lambda a: loader_of(a, width=0), "width"),
    refused_case("batches of no row", lambda a: loader_of(a, size=0), "batch_size"),
    refused_case("a batch that ranks cannot share", lambda a: loader_of(a, size=4, ranks=3), "batch_size", "4", "3"),
    refused_case("a batch smaller than the ranks", lambda a: loader_of(a, size=2, ranks=4), "batch_size", "2", "4"),
    refused_case("a rank behind the last", lambda a: loader_of(a, rank=2, ranks=2), "rank", "2"),
    refused_case("a rank below 0", lambda a: loader_of(a, rank=-1, ranks=2), "rank", "-1"),
    restoring(8, 1, documents_of([5, 4, 3, 6, 7, 2, 9, 8], 2), "documents"),
    restoring(9, 1, documents_of([5, 4, 3, 6, 7, 2, 9, 8], 1), "width"),
    restoring(8, 2, documents_of([5, 4, 3, 6, 7, 2, 9, 8], 1), "seed"),
)
