"""Text that is none: special files, damaged tables, records that are not what their file says, the hub without a network."""

import gzip
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from hostile import Row, call, chapter, trainer

CODE = "".join(f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(30))
RECORD = json.dumps({"text": CODE}) + "\n"
TEXTS = [CODE.replace("function", f"name_{i * 7919}") for i in range(12)]


def folder_of_code(folder: Path) -> Path:
    """A folder of files to train on, in which a row puts something else."""
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.py").write_text(text)
    return folder / "texts"


def put(name: str, content: bytes | str) -> Callable[[Path], None]:
    """Makes one file."""
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content) and None


def code_twice(folder: Path) -> None:
    """Each file of code a second time, under another name."""
    for path in list(folder_of_code(folder).iterdir()):
        path.with_name(f"again-{path.name}").write_bytes(path.read_bytes())


def among_code(name: str, content: bytes | str) -> Callable[[Path], None]:
    """Makes one file among others that can be trained on."""
    return lambda folder: put(name, content)(folder_of_code(folder))


def parquet(**columns) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")

    return make


def damaged_parquet(damage: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        parquet(text=[CODE + str(i) for i in range(3000)])(folder)
        (folder / "rows.parquet").write_bytes(damage((folder / "rows.parquet").read_bytes()))

    return make


def saved(damage: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A dataset that `save_to_disk` wrote, and whose file of values was damaged."""

    def make(folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": [CODE + str(i) for i in range(300)]}).save_to_disk(folder / "saved")
        file = next((folder / "saved").glob("*.arrow"))
        file.write_bytes(damage(file.read_bytes()))

    return make


def saved_as_lists(folder: Path) -> None:
    (folder / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (folder / "saved" / name).write_text("[]")


def bound_socket(folder: Path) -> None:
    os.chdir(folder)  # the names of sockets are short
    socket.socket(socket.AF_UNIX).bind("a.socket")


def fifo_among_code(folder: Path) -> None:
    os.mkfifo(folder_of_code(folder) / "waits.py")


def device_among_code(folder: Path) -> None:
    (folder_of_code(folder) / "zeros.py").symlink_to("/dev/zero")


def circle_of_links(folder: Path) -> None:
    (folder_of_code(folder) / "deeper").symlink_to(folder / "texts")


def broken_link_among_code(folder: Path) -> None:
    (folder_of_code(folder) / "gone.py").symlink_to("nowhere.py")


def name_that_is_not_utf8(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder_of_code(folder)) + b"/caf\xe9.py")).write_text(CODE.replace("function", "coffee"))


def closed_folder(folder: Path) -> None:
    """Readable by nobody; root reads it all the same, so the row gives up root."""
    folder_of_code(folder)
    (folder / "texts" / "closed").mkdir(mode=0o000)
    folder.chmod(0o755)


def closed_file(folder: Path) -> None:
    closed_folder(folder)
    (folder / "texts" / "closed").rmdir()
    (folder / "texts" / "secret.py").write_text(CODE)
    (folder / "texts" / "secret.py").chmod(0o000)


def read_as_somebody_else() -> None:
    from shared.data.source import Source
    from shared.data.sources import open_source

    if os.getuid() == 0:
        os.setuid(65534)
    list(open_source(Source("texts"), print))


def bomb(folder: Path) -> None:
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(270):
            file.write(bytes(2**20))


def train_on(name: str, path: str, says: str | tuple[str, ...], make: Callable[[Path], None] | None = None, **how) -> Row:
    """The trainer on one source, which it refuses."""
    return Row(name, trainer(f"data.prepare.sources=[{{path: '{path}'}}]"), says, **{"code": 1, "make": make} | how)


def read(name: str, path: str, says: str | tuple[str, ...], make: Callable[[Path], None] | None, kept: int = 0, **fields) -> Row:
    """A source that is read: what is skipped is printed by name, and `kept` documents come out; with 0, it is refused."""

    def open_it() -> None:
        from shared.data.source import Source
        from shared.data.sources import open_source

        print(len(list(open_source(Source(path, **fields), print))), "kept")

    open_it.__name__ = "read_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    globals()[open_it.__name__] = open_it  # where `call` finds it
    says = (says,) if isinstance(says, str) else says
    return Row(name, call(open_it), (*says, f"{kept} kept") if kept else says, code=0 if kept else 1, make=make)


def resumed_after_a_cut() -> None:
    """A stream that breaks off, as `datasets` would raise it."""
    import datasets

    from shared.data import hub
    from shared.data.source import Source
    from shared.data.sources import open_source

    def broken():
        yield {"text": CODE}
        raise ConnectionResetError("the peer hung up")

    hub.ask = lambda source: None
    datasets.load_dataset = lambda *_, **__: datasets.IterableDataset.from_generator(broken)
    list(open_source(Source("some/stream"), print))


REGULAR = "is not a regular file"
HALF = lambda content: content[: len(content) // 2]  # noqa: E731
NOISE = lambda content: content[:400] + bytes(range(256)) * 18 + content[5008:]  # noqa: E731

SPECIAL_FILES = [
    train_on("a FIFO, which waits for a writer", "waits", REGULAR, lambda folder: os.mkfifo(folder / "waits")),
    train_on("a FIFO named like a table", "waits.jsonl", REGULAR, lambda folder: os.mkfifo(folder / "waits.jsonl")),
    train_on("a device without an end", "/dev/zero", REGULAR),
    train_on("a socket", "a.socket", REGULAR, bound_socket),
    train_on("what the kernel makes up", "/proc/cpuinfo", "cpuinfo is empty"),
    read("a FIFO among files", "texts", f"waits.py {REGULAR}", fifo_among_code, 12),
    read("a device among files", "texts", f"zeros.py {REGULAR}", device_among_code, 12),
    read("a circle of links", "texts", "deeper is a link to a folder, and not followed", circle_of_links, 12),
    read("a link to nothing among files", "texts", f"gone.py {REGULAR}", broken_link_among_code, 12),
    read("a link to itself", "me", "Too many levels of symbolic links", lambda folder: (folder / "me").symlink_to("me")),
    read("a link to nothing", "me.txt", "me.txt does not exist", lambda folder: (folder / "me.txt").symlink_to("nothing")),
    read("a file's name that is not UTF-8", "texts", "13 kept", name_that_is_not_utf8, 13),
    Row("a folder that is closed", call(read_as_somebody_else), ("texts/closed cannot be read", "Permission denied"), 1, closed_folder),
    Row("a file that is closed", call(read_as_somebody_else), ("secret.py cannot be read", "Permission denied"), 1, closed_file),
]
PATHS = [
    train_on("an empty path", "", "data.prepare.sources[0].path is '', an empty path", code=2),
    train_on("a path of spaces", "  ", "prepare.sources has the path '  '", code=2),
    train_on("a path that is too long", "x" * 5000, "too long for a path", code=2),
    train_on("nobody's home", "~nobody-has-this-name/texts", "there is no user of that name", code=2),
    train_on("no such file", "texts/missing.txt", "texts/missing.txt does not exist"),
    train_on("a file taken for a folder", "a.txt/deeper.txt", "a.txt/deeper.txt does not exist", put("a.txt", CODE)),
    train_on("an empty folder", "texts", "texts holds no file", lambda folder: (folder / "texts").mkdir()),
    train_on("the same source twice", "texts'}, {path: './texts", "prepare.sources holds ./texts twice", folder_of_code, code=2),
    Row("no sources", trainer("data.prepare.sources=[]"), "There are no sources"),
    Row("a weight of 0", trainer("data.prepare.sources=[{weight: 0}]"), "weight is 0"),
    Row("a weight below 0", trainer("data.prepare.sources=[{weight: -1}]"), "weight is -1"),
    Row("a weight that is no number", trainer("data.prepare.sources=[{weight: .nan}]"), "weight is nan"),
    Row("a weight without an end", trainer("data.prepare.sources=[{weight: .inf}]"), "weight is inf"),
    Row("a weight for one of two", trainer("data.prepare.sources=[{weight: 1}, {path: texts}]"), "Some sources have a weight and some"),
    Row("a limit of 0", trainer("data.prepare.sources=[{limit: 0}]"), "limit is 0"),
    Row("a kind that there is not", trainer("data.prepare.sources=[{kind: xml}]"), "xml"),
    Row("chapter 01 on a FIFO", chapter("01", "--data", "waits"), REGULAR, 1, lambda folder: os.mkfifo(folder / "waits")),
    Row("chapter 01 on a device", chapter("01", "--data", "/dev/zero"), REGULAR, 1),
    Row("chapter 01 on less than a window", chapter("01", "--data", "a.txt"), "window", 1, put("a.txt", "few")),
    Row("chapter 02 on an empty file", chapter("02", "--data", "a.txt"), "is empty", 1, put("a.txt", "")),
    Row("chapter 03 on a FIFO", chapter("03", "--data", "waits"), REGULAR, 1, lambda folder: os.mkfifo(folder / "waits")),
    Row("chapter 04 on a binary file", chapter("04", "--data", "a.txt"), "is a binary file", 1, put("a.txt", b"\0\1")),
    Row("chapter 05 on no file", chapter("05", "--data", "none.txt"), "none.txt does not exist", 1),
    Row("chapter 06 on a socket", chapter("06", "--data", "a.socket"), REGULAR, 1, bound_socket),
]
TEXT = [
    train_on("an empty file", "a.txt", "a.txt is empty", put("a.txt", "")),
    train_on("nothing but spaces", "a.txt", "a.txt is empty", put("a.txt", " \n\t\n")),
    train_on("a picture", "a.png", "a.png is a binary file", put("a.png", b"\x89PNG\r\n\0\0")),
    train_on("a spreadsheet", "a.xlsx", "a.xlsx is a binary file", put("a.xlsx", b"PK\3\4\0\0")),
    train_on("Latin-1", "a.txt", "a.txt is not UTF-8", put("a.txt", "café ".encode("latin-1") * 50)),
    train_on("UTF-16", "a.txt", "a.txt is a binary file", put("a.txt", CODE.encode("utf-16"))),
    train_on("five letters", "a.txt", "shorter than 64 bytes", put("a.txt", "hello")),
    train_on("one line of a megabyte", "a.txt", "a line over 1000 characters", put("a.txt", "ab cd " * 200_000)),
    read("a line of Japanese longer than a part", "a.txt", "2 kept", put("a.txt", "a" + "日本語" * 250_000), 2),
    read("a byte order mark", "a.txt", "1 kept", put("a.txt", b"\xef\xbb\xbf" + CODE.encode()), 1),
    read("lone surrogates in a text file", "texts", "surrogates.txt is not UTF-8", among_code("surrogates.txt", b"\xed\xa0\x80 text"), 12),
    Row(
        "what was left out is said before the first step",
        trainer("data.prepare.sources=[{path: texts}]", "data.prepare.vocab_size=300", "data.seq=48", "data.epochs=1", "steps=1000000"),
        ("Left out, for there was no text in it: 1 is not UTF-8", "report.json"), 1, among_code("latin.txt", b"caf\xe9"),
    ),
    train_on(
        "text for less than one step", "a.py", ("rows of 96 tokens, and a step takes 4", "smaller batch_size"), put("a.py", CODE[:600]),
    ),
]  # fmt: skip
TABLES = [
    read("JSON nested too deep", "a.jsonl", "a.jsonl:2 is nested too deep", put("a.jsonl", RECORD + "[" * 10**5 + "\n" + RECORD), 2),
    read("JSON that is not", "a.jsonl", "a.jsonl:2 is not JSON", put("a.jsonl", RECORD + "{broken\n" + RECORD), 2),
    read("JSON that was cut short", "a.jsonl", "a.jsonl:2 is not JSON", put("a.jsonl", RECORD + RECORD[:40]), 1),
    read("zeros where records were", "a.jsonl", "a.jsonl:2 is not JSON", put("a.jsonl", RECORD + "\0" * 4096 + "\n" + RECORD), 2),
    read("half a character in JSON", "a.jsonl", "a.jsonl:1 is not UTF-8", put("a.jsonl", '{"text": "\\ud800"}\n' + RECORD), 1),
    read("a number of 10,000 digits", "a.jsonl", "a.jsonl:1 is not JSON", put("a.jsonl", f'{{"n": {"9" * 10_000}}}\n' + RECORD), 1),
    read("a text that is a number", "a.jsonl", "a.jsonl:1 has no text in field 'text'", put("a.jsonl", '{"text": 3}\n' + RECORD), 1),
    read("a record without the field", "a.jsonl", "a.jsonl:2 has no field 'text'", put("a.jsonl", RECORD + '{"id": 3}\n' + RECORD), 2),
    read("a record that is a list", "a.jsonl", "a.jsonl:2 is not a record with fields", put("a.jsonl", RECORD + "[1]\n"), 1),
    read("a byte order mark before JSON", "a.jsonl", "1 kept", put("a.jsonl", b"\xef\xbb\xbf" + RECORD.encode()), 1),
    read("records none of which has the field", "a.jsonl", ("has no field 'text'", "text_field: id"), put("a.jsonl", '{"id": 3}\n' * 5)),
    read("texts all of which are lists", "a.jsonl", "field 'text' holds list, not text", put("a.jsonl", '{"text": []}\n' * 5)),
    read("a stream of records without the field", "a.jsonl", "has no field 'text'", put("a.jsonl", '{"id": 3}\n' * 5000 + RECORD)),
    train_on("text named like JSON", "a.jsonl", "a.jsonl:1 is not JSON", put("a.jsonl", CODE)),
    train_on("a deep .json file", "a.json", "a.json is nested too deep", put("a.json", "[" * 200_000)),
    train_on("a number named like JSON", "a.json", "a.json:1 is not a record with fields", put("a.json", "3")),
    train_on("an empty list", "a.json", "it holds nothing", put("a.json", "[]")),
    train_on("an empty table", "a.csv", "a.csv is empty", put("a.csv", "")),
    train_on("a table of a header alone", "a.csv", "it holds nothing", put("a.csv", "text\n")),
    train_on("a table without the column", "a.csv", ("a.csv has no field 'text'", "'a', 'b'"), put("a.csv", "a,b\n1,2\n")),
    read("zeros in a table", "a.csv", "a.csv:1 is a binary file", put("a.csv", "text\nab\0cd\nfine words\n"), 1),
    read("a table's quote that is never closed", "a.csv", "1 kept", put("a.csv", 'text\n"never closed\n' + CODE), 1),
    read("a table's rows of other lengths", "a.csv", ("a.csv:2 is empty", "2 kept"), put("a.csv", "id,text\n1,a,b,c\n2\n3,d\n"), 2),
    train_on("half of a gzip", "a.jsonl.gz", "cannot be read to its end", put("a.jsonl.gz", HALF(gzip.compress(RECORD.encode() * 99)))),
    train_on("gzip that is none", "a.txt.gz", "a.txt.gz cannot be read to its end", put("a.txt.gz", CODE)),
    train_on("a line of 270 MB in 1 MB of gzip", "bomb.jsonl.gz", "bomb.jsonl.gz:1 is longer than", bomb),
    train_on("a column of numbers", "rows.parquet", "field 'text' holds int, not text", parquet(text=[1, 2])),
    train_on("a column of lists", "rows.parquet", "field 'text' holds list, not text", parquet(text=[["a"], ["b"]])),
    train_on("a column of nothing", "rows.parquet", "rows.parquet:1 is empty", parquet(text=[None, None])),
    train_on("Parquet without the column", "rows.parquet", ("has no field 'text'", "'body'"), parquet(body=[CODE])),
    train_on("Parquet that was cut short", "rows.parquet", "rows.parquet is not a whole Parquet file", damaged_parquet(HALF)),
    train_on("Parquet with noise in it", "rows.parquet", "rows.parquet cannot be read to its end", damaged_parquet(NOISE)),
    train_on("text named like Parquet", "rows.parquet", "rows.parquet is not a whole Parquet file", put("rows.parquet", CODE)),
    train_on("a folder named like Parquet", "rows.parquet", "rows.parquet holds no file", lambda folder: (folder / "rows.parquet").mkdir()),
    train_on("one damaged file among good ones", "texts", "rows.parquet is not a whole Parquet file", among_code("rows.parquet", CODE)),
    train_on("settings among code", "texts", ("package.json:1 has no field 'text'", "suffixes"), among_code("package.json", '{"name": 1}')),
    train_on("a saved dataset that was cut short", "saved", "saved is not a whole dataset folder", saved(HALF)),
    train_on("a saved dataset with noise in it", "saved", "saved is damaged", saved(NOISE)),
    train_on("a saved dataset whose state is a list", "saved", "saved is not a whole dataset folder", saved_as_lists),
]  # fmt: skip
SPLIT = [
    Row(
        "held-out documents that are trained on too",
        trainer("data.prepare.sources=[{path: texts}]", "data.prepare.cleaning.stages=[length]"),
        "held-out documents are in the training text too, so the held-out loss is too low: add the stage exact duplicates",
        code=0, make=code_twice,
    ),
]  # fmt: skip
HUB = [
    train_on("a dataset's name that none can have", "no body/!!", ("The hub dataset 'no body/!!'", "cannot be opened")),
    Row("a stream that breaks off", call(resumed_after_a_cut), ("'some/stream' broke off after record 1", "the peer hung up"), 1),
]

ROWS = [*SPECIAL_FILES, *PATHS, *TEXT, *TABLES, *SPLIT, *HUB]
