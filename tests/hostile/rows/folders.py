"""Paths that no file or folder can have, and folders that are none or cannot be written, in every field that holds one."""

from pathlib import Path

from hostile import Row, chapter, trainer


def loop(folder: Path) -> None:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")


FIELDS = ("engine.output", "data.prepared", "data.prepare.tokenizer")
NO_PATHS = [  # (what, the word, what the sentence says beside the key)
    ("empty", "", "an empty path"),
    ("of an unknown user", "~nobody_here/x", "there is no user of that name"),
    ("with a name of 300 letters", "x" * 300, "too long for a path"),
    ("of 5,000 letters", "x/" * 2500, "too long for a path"),
]


def nested(key: str, value: object) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


ROWS = [
    *(Row(f"{key} {what}", trainer(f"{key}={word}"), (f"{key} is", says)) for key in FIELDS for what, word, says in NO_PATHS),
    *(Row(f"{key} with a zero byte", trainer(**nested(key, "a\0b")), (f"{key} is 'a\\x00b'", "a zero byte")) for key in FIELDS),
    *(Row(f"{key} null in a file", trainer(**nested(key, None)), f"{key} is null: give a path") for key in FIELDS[:2]),
    *(Row(f"{key} null as a word", trainer(f"{key}=null"), f"{key} is null: give a path") for key in FIELDS[:2]),
    Row("a file for the output folder", trainer("engine.output={folder}/tiny.yaml"), ("tiny.yaml", "cannot be written"), code=1),
    Row("an output folder below a file", trainer("engine.output={folder}/tiny.yaml/run"), ("tiny.yaml/run", "cannot be written"), code=1),
    Row("an output folder that cannot be", trainer("engine.output=/proc/nothing/run"), ("/proc/nothing", "cannot be written"), code=1),
    Row("an output folder in a loop of links", trainer("engine.output={folder}/a/run"), ("/a/run", "cannot be written"), code=1, make=loop),
    Row("a file for prepared text", trainer("data.prepared={folder}/tiny.yaml"), ("tiny.yaml", "cannot be written"), code=1),
    Row("prepared text that cannot be", trainer("data.prepared=/proc/nothing/text"), ("/proc/nothing", "cannot be written"), code=1),
    Row("prepared text in a loop of links", trainer("data.prepared={folder}/a"), ("/a", "cannot be written"), code=1, make=loop),
    Row("a tokenizer that is not there", trainer("data.prepare.tokenizer=none.json"), "none.json does not exist", code=1),
    Row("a configuration for a tokenizer", trainer("data.prepare.tokenizer={folder}/tiny.yaml"), "tiny.yaml is not a tokenizer", code=1),
    Row("a chapter's output below a file", chapter("01", "--output", "{folder}/tiny.yaml/x"), "cannot be written", code=1),
    Row("a chapter's output of an unknown user", chapter("04", "--engine.output", "~nobody_here/x"), "no user of that name"),
    Row("brackets and colons in a path", trainer("engine.output={folder}/[red]:x:[/]"), "[red]:x:[/]", code=0),
]
