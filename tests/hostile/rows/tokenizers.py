"""Tokenizers that lose text or cannot be read, prompts and drawing, more epochs than can be planned, and prepared text that was damaged."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hostile import Row, call, chapter, trainer

END = "</s>"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
GIVEN = "data.prepare.tokenizer={folder}/tokenizer.json"


def byte_tokenizer(**parts) -> dict:
    """A byte-level BPE without merges, with other parts where they are given."""
    from tokenizers import pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {END: 256}
    end = {"id": 256, "content": END, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    sections = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None, "post_processor": None}
    return sections | {"pre_tokenizer": BYTES, "decoder": BYTES, "model": model} | parts


def tokenizer(edit: Callable[[dict], None] = lambda raw: None, **parts) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        raw = byte_tokenizer(**parts)
        edit(raw)
        (folder / "tokenizer.json").write_text(json.dumps(raw))

    return make


def with_config(content: str) -> Callable[[Path], None]:
    """A sound tokenizer beside a tokenizer_config.json of this content."""

    def make(folder: Path) -> None:
        tokenizer()(folder)
        (folder / "tokenizer_config.json").write_text(content)

    return make


def holes(raw: dict) -> None:
    raw["model"]["vocab"]["far"] = 4_000_000_000


def without_an_end(raw: dict) -> None:
    raw["added_tokens"] = []


def words_alone(raw: dict) -> None:
    raw["model"] = {"type": "WordLevel", "vocab": {"def": 0, "x": 1, "<unk>": 2, END: 3}, "unk_token": "<unk>"}
    raw["added_tokens"][0]["id"] = 3
    raw |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}


def two_tokens_of_one_id(raw: dict) -> None:
    raw["model"]["vocab"]["b"] = raw["model"]["vocab"]["a"]


def refused(name: str, make: Callable[[Path], None], *says: str) -> Row:
    """The trainer with a tokenizer that it cannot train with."""
    return Row(f"a tokenizer: {name}", trainer(GIVEN), says, 1, make)


def file(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.json").write_bytes(content) and None


TOKENIZERS = [
    refused("none", lambda folder: None, "tokenizer.json does not exist"),
    refused("an empty file", file(b""), "tokenizer.json is not a tokenizer of the tokenizers library", "copy it again"),
    refused("no JSON", file(b"{broken"), "tokenizer.json is not a tokenizer"),
    refused("a list", file(b"[]"), "tokenizer.json is not a tokenizer"),
    refused("zeros", file(bytes(4096)), "tokenizer.json is not a tokenizer"),
    refused("nested too deep", file(b"[" * 100_000), "tokenizer.json is not a tokenizer"),
    refused("no model in it", tokenizer(lambda raw: raw.pop("model")), "tokenizer.json is not a tokenizer"),
    refused("cut short", lambda folder: file(json.dumps(byte_tokenizer()).encode()[:3000])(folder), "tokenizer.json is not a tokenizer"),
    refused("a folder in its place", lambda folder: (folder / "tokenizer.json/tokenizer.json").mkdir(parents=True), "is not a file"),
    refused("a FIFO", lambda folder: os.mkfifo(folder / "tokenizer.json"), "tokenizer.json is not a file"),
    refused("a device", lambda folder: (folder / "tokenizer.json").symlink_to("/dev/zero"), "tokenizer.json is not a file"),
    refused("a link to itself", lambda folder: (folder / "tokenizer.json").symlink_to("tokenizer.json"), "Too many levels"),
    refused("ids with a hole of billions", tokenizer(holes), "258 tokens and ids up to 4,000,000,000", "number the tokens without gaps"),
    refused("no token that ends a document", tokenizer(without_an_end), "no special token that ends a document"),
    refused("lower case", tokenizer(normalizer={"type": "Lowercase"}), "does not give text back", "'def f("),
    refused("ends lost", tokenizer(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), "does not give text back"),
    refused("lines lost", tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}), "does not give text"),
    refused("words without what is between them", tokenizer(words_alone), "does not give text back"),
    refused("no decoder", tokenizer(decoder=None), "does not give text back"),
    refused("two tokens of one id", tokenizer(two_tokens_of_one_id), "does not give text back"),
    refused("no JSON beside it", with_config("{broken"), "tokenizer_config.json cannot be read"),
    refused("an empty file beside it", with_config(""), "tokenizer_config.json cannot be read"),
    refused("a list beside it", with_config("[]"), "tokenizer_config.json holds no JSON object"),
    refused("nested too deep beside it", with_config("[" * 100_000), "tokenizer_config.json cannot be read"),
    refused("an end that is a number", with_config('{"eos_token": 3}'), "gives the eos_token 3"),
    refused("an end that it does not have", with_config('{"eos_token": "<end>"}'), "no special token '<end>'"),
    Row("a vocabulary too small for bytes", trainer("data.prepare.vocab_size=100"), "vocab_size is 100"),
    Row("chapter 03: no tokenizer", chapter("03", "--prepare.tokenizer", "none/tokenizer.json"), "none/tokenizer.json does not exist", 1),
]


def draw(temperature: float = 1.0, top_k: int | None = None, prompt: int = 3, context: int = 4) -> None:
    """Tokens of a model whose logits are large, so that a small temperature would overflow."""
    import torch

    from shared.sampling import generate

    class Model(torch.nn.Module):
        def forward(self, ids):
            return torch.linspace(-1e3, 1e3, 7).expand(*ids.shape, 7)

    ids = torch.zeros(1, prompt, dtype=torch.int64)
    print("drawn:", [token.item() for token in generate(Model(), ids, 3, context=context, temperature=temperature, top_k=top_k)])


def draw_at_1e_40() -> None:
    draw(temperature=1e-40)


def draw_at_5e_324() -> None:
    draw(temperature=5e-324)


def draw_at_nan() -> None:
    draw(temperature=float("nan"))


def draw_at_infinity() -> None:
    draw(temperature=float("inf"))


def draw_at_minus_1() -> None:
    draw(temperature=-1.0)


def draw_from_none() -> None:
    draw(top_k=0)


def draw_from_more_than_there_are() -> None:
    draw(temperature=1e-9, top_k=10**9)


def draw_after_nothing() -> None:
    draw(prompt=0)


def draw_after_more_than_the_context() -> None:
    draw(temperature=0.0, prompt=100)


DRAWING = [
    Row("a temperature of 1e-40", call(draw_at_1e_40), "drawn: [6, 6, 6]", 0),
    Row("the smallest temperature", call(draw_at_5e_324), "drawn: [6, 6, 6]", 0),
    Row("a temperature that is no number", call(draw_at_nan), "temperature is nan", 1),
    Row("a temperature without an end", call(draw_at_infinity), "temperature is inf", 1),
    Row("a temperature below 0", call(draw_at_minus_1), "temperature is -1.0", 1),
    Row("a draw from no token", call(draw_from_none), "top_k is 0", 1),
    Row("a draw from more tokens than there are", call(draw_from_more_than_there_are), "drawn: [6, 6, 6]", 0),
    Row("nothing to continue", call(draw_after_nothing), "The prompt is empty", 1),
    Row("more to continue than the context", call(draw_after_more_than_the_context), "drawn: [6, 6, 6]", 0),
    Row("an empty prompt", trainer('report.prompts=[""]'), "report.prompts"),
    Row("chapter 01: a temperature that is no number", chapter("01", "--temperature", "nan"), "temperature"),
    Row("chapter 02: a temperature below 0", chapter("02", "--temperature", "-1"), "temperature is -1.0", 1),
    Row("chapter 03: a draw from no token", chapter("03", "--top_k", "0"), "top_k is 0", 1),
    Row("chapter 04: a temperature below 0", chapter("04", "--temperature", "-0.5"), "temperature is -0.5", 1),
    Row("chapter 04: an empty prompt", chapter("04", "--prompt", ""), "The prompt is empty", 1),
    Row("chapter 05: an empty prompt", chapter("05", "--prompt", ""), "The prompt is empty", 1),
]

def prepared(name: str, damage: Callable[[bytes], bytes] | None, also_without: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Damages one file of the prepared text; None puts a folder in its place. Other files go, so that this one is read."""

    def make(folder: Path) -> None:
        [home] = (place for place in (folder / "prepared").iterdir() if place.is_dir())
        for gone in also_without:
            shutil.rmtree(home / gone) if (home / gone).is_dir() else (home / gone).unlink()
        [file] = home.glob(name)
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(damage(content)) if damage else file.mkdir()

    return make


def remade(name: str, file: str, damage: Callable[[bytes], bytes] | None, *says: str, also_without: tuple[str, ...] = ()) -> Row:
    """The trainer on prepared text of which one file is damaged."""
    return Row(f"prepared text: {name}", trainer(), says, 1, prepared(file, damage, also_without))


def header(edit: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Another header for a safetensors file; the content stays."""

    def damage(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        raw = json.loads(content[8 : 8 + length])
        text = json.dumps(edit(raw) or raw).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return damage


def longer_document(raw: dict) -> None:
    raw["offsets"]["shape"] = [raw["offsets"]["shape"][0] + 1]


def other_dtype(raw: dict) -> None:
    raw["tokens"]["dtype"] = "F32"


def other_size(raw: dict) -> None:
    raw["__metadata__"]["vocab_size"] = "7"


def before_the_file(raw: dict) -> None:
    raw["tokens"]["data_offsets"] = [-8, 8]


HALF = lambda content: content[: len(content) // 2]  # noqa: E731
SHARD, DAMAGED = "training/*.safetensors", ("delete it and prepare the text again",)
LAST, AGAIN = "clean/complete.json", "and the same command prepares the text again"
PREPARED = [
    remade("a shard cut short", SHARD, HALF, *DAMAGED),
    remade("an empty shard", SHARD, lambda content: b"", *DAMAGED),
    remade("a shard of zeros", SHARD, lambda content: bytes(len(content)), *DAMAGED),
    remade("one token changed", SHARD, lambda content: content[:-9000] + b"\1" + content[-8999:], "was changed after it was written"),
    remade("a header longer than the file", SHARD, lambda content: b"\xff" * 8 + content[8:], *DAMAGED),
    remade("a header nested too deep", SHARD, lambda content: (10**5).to_bytes(8, "little") + b"[" * 10**5, *DAMAGED),
    remade("a header that is a list", SHARD, header(lambda raw: [1, 2]), *DAMAGED),
    remade("a header of numbers", SHARD, header(lambda raw: {"tokens": 3}), *DAMAGED),
    remade("documents that are not there", SHARD, header(longer_document), *DAMAGED),
    remade("tokens of another type", SHARD, header(other_dtype), *DAMAGED),
    remade("another vocabulary in the header", SHARD, header(other_size), "was changed after it was written"),
    remade("tokens before the file's beginning", SHARD, header(before_the_file), *DAMAGED),
    remade("a folder in a shard's place", SHARD, None, "prepare the text again"),
    remade("held-out text cut short", "held_out/*.safetensors", HALF, *DAMAGED),
    remade("a record that is no JSON", LAST, HALF, "complete.json is damaged", AGAIN),
    remade("an empty record", LAST, lambda content: b"", "complete.json is damaged", AGAIN),
    remade("a record that is a list", LAST, lambda content: b"[]", "complete.json is damaged", AGAIN),
    remade("a record nested too deep", LAST, lambda content: b"[" * 10**5, "complete.json is damaged", AGAIN),
    remade("a folder in the record's place", LAST, None, "complete.json is damaged", AGAIN),
    remade("a part's record that is empty", "clean/00000.json", lambda content: b"{}", "00000.json is damaged", AGAIN),
    remade("what cleaning remembered, cut short", "clean/*.remembered.safetensors", HALF, "is damaged", AGAIN, also_without=(LAST,)),
    remade("cleaned text cut short", "clean/*.parquet", HALF, "00000.parquet is damaged", AGAIN, also_without=("training",)),
    remade("a tokenizer cut short", "tokenizer.json", HALF, "tokenizer.json is not a tokenizer", "prepares the text again"),
]
STEPS = [
    Row("a billion epochs, and more steps", trainer("data.epochs=1000000000", "steps=9000000000000000"), "data.epochs is 1000000000", 1),
    Row("more steps than one epoch has", trainer("data.epochs=1", "steps=1000000000"), ("data.epochs is 1, which gives", "steps"), 1),
    Row("a batch that text does not fill", trainer("data.batch_size=100000", "data.micro_batch_size=1"), "and a step takes 100,000", 1),
    Row("chapter 03: too little text", chapter("03", "--data", "a.py", "--prepare.vocab_size", "400"), "and a step takes 8", 1,
        lambda folder: (folder / "a.py").write_text("def f(x):\n    return x + 1\n" * 9) and None),
]  # fmt: skip

ROWS = [*TOKENIZERS, *DRAWING, *PREPARED, *STEPS]
