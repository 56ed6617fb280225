"""Stage 6 of build 03: tokenizer.json, read by Hugging Face's tokenizers and written by it."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.course.checking import Case

from .pieces import LIBRARY, Results, in_bytes, numbers, written_merges
from .tokenizing import ACCENTS, CODE, END, PAD, small, trained

NAMES = (END, PAD, "[a+b] ü")
TRIED = f"{CODE}{END}return{PAD}{PAD} ქართ {ACCENTS}\x00[a+b] ü."


def written(save: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        save(path)
        return json.loads(path.read_text(encoding="utf-8"))


def save_case(title: str, names: tuple[str, ...]) -> Case:
    """A file of the learner, read by the library."""

    def observe(adapters: Any, **_: Any) -> Results:
        tokenizer = small(adapters, names)
        return about(Tokenizer.from_str(json.dumps(written(lambda path: adapters.save(tokenizer, path)))), names)

    expected = lambda **_: about(trained(names)[2], names)  # noqa: E731
    return Case("oracle", title, lambda: {"special": list(names), "text": TRIED}, expected, LIBRARY, observe)


def about(made: Tokenizer, names: tuple[str, ...]) -> Results:
    ids = made.encode(TRIED).ids
    made.encode_special_tokens = True
    plain = made.encode(TRIED).ids
    made.encode_special_tokens = False
    known = {name: made.token_to_id(name) for name in names}
    special = sorted(number for number, token in made.get_added_tokens_decoder().items() if token.special)
    return {
        "ids": ids, "ids where special tokens are text": plain, "text of the ids": made.decode(ids, skip_special_tokens=False),
        "text without special tokens": made.decode(ids), "ids of special tokens": known, "special": special,
        "size": made.get_vocab_size(), "ids of a word in front": made.encode("return").ids,
    }  # fmt: skip


def again_case(title: str, names: tuple[str, ...]) -> Case:
    """A file of the learner, read by the learner."""

    def observe(adapters: Any, **_: Any) -> Results:
        tokenizer = small(adapters, names)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokenizer.json")
            adapters.save(tokenizer, path)
            loaded = adapters.load(path)
            path.unlink()
        return read(adapters, loaded)

    def expected(**_: Any) -> Results:
        return wanted(trained(names)[2], names)

    return Case("property", title, lambda: {"special": list(names), "text": TRIED}, expected, LIBRARY, observe)


def read(adapters: Any, loaded: object) -> Results:
    ids = numbers(adapters.encode_special(loaded, TRIED))
    return {
        "ids": ids, "ids where special tokens are text": numbers(adapters.encode(loaded, TRIED)),
        "bytes of the ids": repr(adapters.decode(loaded, ids)), "merges": written_merges(adapters, loaded),
        "vocabulary": [repr(bytes(each)) for each in adapters.vocabulary(loaded)],
    }  # fmt: skip


def wanted(made: Tokenizer, names: tuple[str, ...]) -> Results:
    ids = made.encode(TRIED).ids
    made.encode_special_tokens = True
    plain = made.encode(TRIED).ids
    made.encode_special_tokens = False
    by_id = {number: token for token, number in made.get_vocab(with_added_tokens=True).items()}
    tokens = [repr(by_id[number].encode() if by_id[number] in names else in_bytes(by_id[number])) for number in range(len(by_id))]
    merges = [f"{in_bytes(left)!r} {in_bytes(right)!r}" for left, right in json.loads(made.to_str())["model"]["merges"]]
    names = "ids", "ids where special tokens are text", "bytes of the ids", "merges", "vocabulary"
    return dict(zip(names, (ids, plain, repr(TRIED.encode()), merges, tokens), strict=True))


def special_first() -> Tokenizer:
    """As `BpeTrainer` makes it when special tokens are given to it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in NAMES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        trained()[0], trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False, special_tokens=special)
    )
    return made


def shuffled() -> Tokenizer:
    """The same merges, and ids in no order."""
    file = json.loads(trained(NAMES)[2].to_str())
    places = list(range(len(file["model"]["vocab"])))
    random.Random(3).shuffle(places)
    file["model"]["vocab"] = {token: places[number] for token, number in file["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(file))


def load_case(title: str, make: Any, older: bool = False) -> Case:
    """A file of the library, read by the learner."""

    def observe(adapters: Any, **_: Any) -> Results:
        file = json.loads(make().to_str())
        if older:
            file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokenizer.json")
            path.write_text(json.dumps(file, ensure_ascii=older), encoding="utf-8")
            return read(adapters, adapters.load(path))

    return Case("oracle", title, lambda: {"text": TRIED}, lambda **_: wanted(make(), NAMES), LIBRARY, observe)


FILES = (
    save_case("the library reads yours", ()),
    save_case("the library reads yours, with special tokens", NAMES),
    again_case("you read yours", NAMES),
    again_case("you read yours, without special tokens", ()),
    load_case("you read the library's", lambda: trained(NAMES)[2]),
    load_case("you read the library's, with merges as one text", lambda: trained(NAMES)[2], older=True),
    load_case("you read the library's, with special tokens first", special_first),
    load_case("you read the library's, with ids in no order", shuffled),
)
