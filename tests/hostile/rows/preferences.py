"""Pairs that are none, through the library: no answer, no prompt, equal answers, damaged files, two kinds in one set."""

import json
from pathlib import Path

from hostile import Row, call

PAIR = {"prompt": "What is it?", "chosen": "It is four.", "rejected": "No."}
DEEP = json.dumps(PAIR)[:-1] + ', "tools": ' + "[" * 100_000 + "]" * 100_000 + "}"


def prepare() -> None:
    """Prepares the row's pairs."""
    from shared.data.tokenizer import TextTokenizer
    from shared.finetune.chat.datasets import ChatSource
    from shared.preference.config import PreferenceConfig
    from shared.preference.prepare import prepare_preferences

    TextTokenizer.train(["What is it? It is four."], 500).save_pretrained(Path("model"), 64)
    [source] = Path().glob("a.*")
    prepare_preferences(PreferenceConfig((ChatSource(str(source)),), tokenizer=Path("model")), Path("out"), 64)


def pairs(name: str, content: object, says: str | tuple[str, ...], file: str = "a.jsonl") -> Row:
    """Pairs of this content: the bytes of a file, or one record after a good one."""
    written = content if isinstance(content, bytes) else "\n".join(map(json.dumps, (PAIR, content))).encode()
    return Row(name, call(prepare), says, code=1, make=lambda folder: (folder / file).write_bytes(written) and None)


ROWS = [
    pairs("a pair without its chosen answer", {"prompt": "x", "rejected": "y"}, "a.jsonl:2 has no chosen answer"),
    pairs("a pair of equal answers", PAIR | {"rejected": PAIR["chosen"]}, "a.jsonl:2 has two equal answers"),
    pairs("an answer that says nothing", PAIR | {"chosen": [{"role": "assistant", "content": "  "}]}, "has an empty answer in chosen"),
    pairs("a single answer among pairs", {"prompt": "x", "completion": "y", "label": True}, "a.jsonl:2 is a single answer"),
    pairs("a margin that is no number", PAIR | {"margin": "nan"}, "a.jsonl:2 has the margin 'nan'"),
    pairs("pairs cut short", json.dumps(PAIR).encode()[:-9], "a.jsonl:1 is not JSON"),
    pairs("pairs nested without end", DEEP.encode(), "a.jsonl:1"),
    pairs("pairs in damaged Parquet", b"PAR1PAR1", "is not a whole Parquet file", file="a.parquet"),
]
