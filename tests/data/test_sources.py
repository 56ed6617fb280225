"""Every kind of source through the one door, made on the spot by the libraries that others make theirs with."""

import csv
import gzip
import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from shared.corpus import EMBEDDED, CorpusError
from shared.course.paths import CHECKOUT
from shared.data import hub, sources
from shared.data.source import Source
from shared.data.sources import identity, open_source

TEXTS = ["def f():\n    return 1\n", 'naïve "quoted", text\n\nwith lines', "日本語 and 🙂"]


def read(*arguments, **options) -> list[tuple[str, str]]:
    return [(document.name, document.content.decode()) for document in open_source(Source(*arguments, **options))]


def texts(*arguments, **options) -> list[str]:
    return [text for _, text in read(*arguments, **options)]


def write_jsonl(path):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)), encoding="utf-8")


def write_json(path):
    path.write_text(json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False), encoding="utf-8")


def write_csv(path):
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([["id", "text"], *enumerate(TEXTS)])


def write_parquet(path):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path)


def write_gz(path):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)


WRITERS = {
    "a.jsonl": write_jsonl, "a.json": write_json, "a.csv": write_csv, "a.tsv": write_csv, "a.parquet": write_parquet,
    "a.jsonl.gz": write_gz, "lines.json": write_jsonl,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_records_gives_each_text_to_the_byte(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert read(str(tmp_path / name)) == [(f"{name}:{i}", text) for i, text in enumerate(TEXTS, 1)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_missing_field_is_named_with_those_that_are_there(tmp_path, name):
    WRITERS[name](tmp_path / name)
    way = r"Say in prepare.sources which one holds the text: '\[{path: PATH, text_field: id}\]'"
    with pytest.raises(CorpusError, match=rf"a\.\w+(:1)? has no field 'content': it has 'id', 'text'\. {way}"):
        read(str(tmp_path / name), text_field="content")
    with pytest.raises(CorpusError, match="'id' holds int, not text") if name != "a.csv" else open(os.devnull):
        read(str(tmp_path / name), text_field="id")


def test_a_folder_is_read_file_by_file_each_by_its_ending(tmp_path):
    folder = tmp_path / "code"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.py").write_text("print()")
    (folder / "deep" / "a.py").write_text("pass")
    (folder / ".hidden").write_text("no")
    write_jsonl(folder / "deep" / "t.jsonl")
    assert [name for name, _ in read(str(folder))] == ["b.py", "deep/a.py", "deep/t.jsonl:1", "deep/t.jsonl:2", "deep/t.jsonl:3"]
    assert texts(str(folder), suffixes=(".py",)) == ["print()", "pass"]
    assert texts(str(folder), limit=1) == ["print()"]
    for none in (0, -1):  # neither is ever reached, so all would be read
        with pytest.raises(ValueError, match=f"limit is {none}: give at least 1, or null"):
            Source(str(folder), limit=none)
    with pytest.raises(CorpusError, match=r"no file ending in \['\.rs'\]; endings there: .*'\.jsonl', '\.py'"):
        read(str(folder), suffixes=(".rs",))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CorpusError, match="nothing holds no file: put text files into it"):
        read(str(tmp_path / "nothing"))


def test_what_is_no_text_is_reported_by_name_or_refused(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n{"text": ""}\n{broken\n{"text": "\xff"}\n{"text": null}\n[1]\n')
    (tmp_path / "rows.csv").write_bytes(b"text\nfine\nbad \xff\n")
    skipped = {}
    kept = [document.name for document in open_source(Source(str(tmp_path)), skipped.__setitem__)]
    assert kept == ["good.txt", "rows.csv:1", "rows.jsonl:1"]
    assert skipped == {
        "empty.txt": "is empty", "latin.txt": "is not UTF-8 (byte 3 is 0xe9)", "picture.png": "is a binary file (it holds zero bytes)",
        "rows.jsonl:2": "is empty", "rows.jsonl:3": "is not JSON", "rows.jsonl:4": "is not UTF-8", "rows.jsonl:5": "is empty",
        "rows.jsonl:6": "is not a record with fields", "rows.csv:2": "is not UTF-8 (byte 4 is 0xff)",
    }  # fmt: skip
    with pytest.raises(CorpusError, match=r"^latin.txt is not UTF-8 \(byte 3 is 0xe9\)\.$"):
        read(str(tmp_path / "latin.txt"))


def test_a_large_text_comes_in_parts_that_end_with_lines_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART", 50)
    for content in ("".join(f"line {i}\n" for i in range(40)), "x" * 49, "x" * 50, "x" * 50 + "\nend", "y" * 500):
        (tmp_path / "big.txt").write_text(content)
        parts = read(str(tmp_path / "big.txt"))
        assert "".join(text for _, text in parts) == content
        assert all(text.endswith("\n") for _, text in parts[:-1]) or set(content) == {"y"}
        assert len({name for name, _ in parts}) == len(parts)


def test_saved_and_hub_datasets_open_by_split_streaming_or_not(tmp_path):
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "several")
    (tmp_path / "repository").mkdir()
    dataset.to_parquet(tmp_path / "repository" / "train-00000.parquet")
    assert read(str(tmp_path / "one")) == [(f"one:{i}", text) for i, text in enumerate(TEXTS, 1)]
    assert texts(str(tmp_path / "several"), split="test") == TEXTS[1:2]
    for streaming in (False, True):
        assert texts(str(tmp_path / "repository"), kind="hub", streaming=streaming) == TEXTS
        with pytest.raises(CorpusError, match="has no field 'body': it has 'id', 'text'"):
            read(str(tmp_path / "repository"), kind="hub", streaming=streaming, text_field="body")
    with pytest.raises(CorpusError, match="has no split 'validation': it has 'train', 'test'"):
        read(str(tmp_path / "several"), split="validation")
    with pytest.raises(CorpusError, match=r"split 'dev'\) cannot be opened"):
        read(str(tmp_path / "repository"), kind="hub", split="dev")


def test_the_hub_is_asked_for_all_that_the_source_says(monkeypatch):
    asked, signature = [], inspect.signature(datasets.load_dataset)

    def answer(*arguments, **options):
        asked.append(signature.bind(*arguments, **options).arguments)
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(hub, "ask", lambda source: None)
    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert texts("some/data", config="python", split="test", revision="v1.2", streaming=False) == TEXTS
    assert asked == [{"path": "some/data", "name": "python", "split": "test", "revision": "v1.2", "streaming": False}]


def test_a_stream_that_tells_its_fields_only_as_it_comes_is_read_whole(monkeypatch):
    stream = datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    assert stream.column_names is None
    monkeypatch.setattr(hub, "ask", lambda source: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    assert texts("some/stream") == TEXTS
    with pytest.raises(CorpusError, match="some/stream has no field 'body': it has 'text'"):
        read("some/stream", text_field="body")


def test_a_folder_that_is_missing_is_not_taken_for_a_format_of_the_library(tmp_path, monkeypatch):
    """`load_dataset("text")` would read every file below the current folder."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert {*_PACKAGED_DATASETS_MODULES} <= hub.FORMATS
    (tmp_path / "other.txt").write_text("of something else")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=f"There is no file or folder text in {tmp_path}: check the spelling"):
        texts("text")


def test_a_hub_dataset_that_cannot_be_reached_is_one_sentence():
    code = "from shared.data.sources import *; list(open_source(Source('someone/no-such-dataset')))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    assert "The hub dataset 'someone/no-such-dataset' (split 'train') cannot be opened: " in done.stderr.splitlines()[-1]
    assert f"There is no file or folder someone/no-such-dataset in {Path.cwd()} either: check the spelling" in done.stderr.splitlines()[-1]


def test_a_hub_that_never_answers_is_given_up_after_a_few_seconds(tmp_path):
    """A server that takes connections and says nothing, as behind a broken proxy. The library's other requests do not add to the wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = """
from shared.data import hub
from shared.data.source import Source

class Waiting:
    def get(self, timeout):
        print(timeout)
        return answers.get(timeout=timeout)

answers, asked = hub.ask(Source(path="nobody/nothing"))
print(hub.reason_unreached(Waiting(), asked))
"""
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    seconds, said = done.stdout.splitlines()
    assert "the hub cannot be reached (" in said and float(seconds) <= hub.SECONDS <= 4, done.stderr


def test_a_pattern_names_the_files_that_match(tmp_path):
    for name in ("a.md", "b.txt", "deep/c.md", "deep/.hidden/d.md", ".e.md", "deep/f.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "of a table"}\n' if name.endswith("jsonl") else f"text of {name}\n")
    names = lambda pattern, **settings: [name for name, _ in read(str(tmp_path / pattern), **settings)]  # noqa: E731
    assert names("**/*.md") == ["a.md", "deep/c.md"]
    assert names("*", suffixes=(".txt",)) == ["b.txt"]
    assert names("d*p/*") == ["deep/c.md", "deep/f.jsonl:1"]
    digests = lambda: identity(Source(path=str(tmp_path / "**/*.md")), lambda path: path.read_text())["files"]  # noqa: E731
    before = digests()
    (tmp_path / "g.md").write_text("new\n")
    assert len(before) == 2 and len(digests()) == 3
    with pytest.raises(CorpusError, match="No file matches .*: give another pattern"):
        names("*.rst")


@pytest.mark.parametrize("path", ["no/such/file", "missing.jsonl", "/nowhere/at/all", "./data"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path):
    with pytest.raises(CorpusError, match=f"{path} does not exist"):
        read(path)


def test_damaged_tables_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorpusError, match=r"a\.parquet is not a whole Parquet file"):
        read(str(tmp_path / "a.parquet"))


def test_the_embedded_corpus_comes_through_the_door_whole():
    skipped = {}
    documents = list(open_source(Source(), skipped.__setitem__))
    assert len(documents) + len(skipped) == sum(package.files for package in EMBEDDED)
    assert sum(len(document.content) for document in documents) == sum(package.bytes for package in EMBEDDED)
    assert set(skipped.values()) == {"is empty"}


def test_a_sources_identity_changes_with_its_settings_and_its_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    source = Source(str(tmp_path))
    before = identity(source, Path.read_text)
    assert identity(source, Path.read_text) == before and json.loads(json.dumps(before))["kind"] == "text"
    assert identity(Source(str(tmp_path), text_field="id"), Path.read_text) != before
    write_csv(tmp_path / "b.csv")
    assert identity(source, Path.read_text) != before


@pytest.mark.parametrize("content", [b"not compressed", gzip.compress(b'{"text": "one"}\n' * 4000)[:-20]], ids=["no gzip", "cut short"])
def test_a_compressed_file_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "texts.jsonl.gz").write_bytes(content)
    with pytest.raises(CorpusError, match="texts.jsonl.gz cannot be read to its end"):
        list(open_source(Source(path=str(tmp_path / "texts.jsonl.gz"))))
