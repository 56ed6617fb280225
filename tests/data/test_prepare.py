"""Preparing text: what comes out, nothing done twice, and the same bytes after any interruption, a kill among them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders_of_text import config_of, state_of, write_folder

from shared.corpus import split
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.data import clean_shards, prepare as preparing
from shared.data.cleaning.cleaner import CleaningConfig
from shared.data.loader import EvaluationLoader, PackedLoader
from shared.data.prepare import PrepareConfig, prepare
from shared.data.shards import ENDING, ShardError
from shared.data.source import Source
from shared.data.sources import open_source
from shared.data.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("raw") / "code")


@pytest.fixture(scope="module")
def prepared(raw, tmp_path_factory):
    return prepare(config_of(raw), tmp_path_factory.mktemp("prepared"))


def contents(folder: Path) -> dict[str, str]:
    return {name: digest for name, (digest, _) in state_of(folder).items() if not name.endswith(".png")}


def test_every_kept_document_is_in_one_store_whole(raw, prepared):
    names = [document.name for document in open_source(Source(str(raw)), lambda *_: None)]
    kept = [name for name in names if name not in ("twice.py", "tiny.py")]
    documents = [document for document in open_source(Source(str(raw)), lambda *_: None) if document.name in kept]
    sides = split(documents)
    for store, side in ((prepared.training, sides.training), (prepared.held_out, sides.held_out)):
        assert len(store) == len(side) > 0
        for number, document in enumerate(side):
            ids = store.document(number)
            assert ids[-1] == prepared.tokenizer.end_id and prepared.tokenizer.end_id not in ids[:-1]
            assert prepared.tokenizer.decode(ids).encode() == document.content
            assert store.byte_counts[number] == len(document.content) == prepared.tokenizer.byte_lengths[ids].sum()
    assert len(prepared.training.shards) > 2, "several parts"


def test_the_report_names_what_is_not_in_the_stores(prepared):
    left_out = {example.name: example.reason for example in prepared.report.examples()}
    assert left_out == {"latin.py": "is not UTF-8", "tiny.py": "shorter than 64 bytes", "twice.py": "the same text again"}
    assert prepared.report.documents_out == len(prepared.training) + len(prepared.held_out)
    assert json.loads((prepared.folder / "report.json").read_text())["unreadable"] == {"is not UTF-8": 1}
    assert (prepared.folder / "report.png").exists()


def test_the_same_again_is_nothing_to_do(raw, prepared, monkeypatch):
    before = state_of(prepared.folder)
    for done_already in ("write_shard", "sample"):
        monkeypatch.setattr(preparing, done_already, None)
    monkeypatch.setattr(clean_shards.CleanShards, "make", None)
    again = prepare(config_of(raw, workers=3), prepared.folder.parent)
    assert again.folder == prepared.folder and state_of(prepared.folder) == before
    assert again.training.fingerprint == prepared.training.fingerprint and again.report == prepared.report


def fingerprint(config: PrepareConfig) -> str:
    return preparing.fingerprint(config, lambda path: path.read_bytes().hex())


def test_other_settings_or_other_text_are_prepared_beside_it(raw, prepared, tmp_path):
    folders = {prepared.folder.name}
    for changes in ({"held_out_share": 0.1}, {"tokenizer_bytes": 1000}, {"cleaning": CleaningConfig(min_bytes=1)}):
        folders.add(fingerprint(config_of(raw, **changes)))
    moved = write_folder(tmp_path / "code")
    first = fingerprint(config_of(moved))
    (moved / "file000.py").write_text("changed")
    assert len(folders | {first, fingerprint(config_of(moved))}) == 6


def test_the_size_of_parts_changes_no_document(raw, prepared, tmp_path):
    other = prepare(replace(config_of(raw), part_bytes=10**6), tmp_path)
    assert len(other.training.shards) == 1 and other.report == prepared.report
    assert other.training.lengths.tolist() == prepared.training.lengths.tolist()
    assert other.tokenizer.identity == prepared.tokenizer.identity


# Interruptions.


class Killed(BaseException):
    """As sudden as a kill: no handler of the preparation expects it."""


@pytest.mark.parametrize("after", [2, 9, 11, 12, 13, 14, 18])
def test_preparation_that_dies_at_any_file_resumes_to_the_same_bytes(raw, prepared, tmp_path, monkeypatch, after):
    written = []

    def dies(path, content):
        if len(written) == after:
            path.parent.mkdir(exist_ok=True)
            path.with_name(path.name + ".partial").write_bytes(content[: len(content) // 2])
            raise Killed
        written.append(path)
        whole(path, content)

    whole = clean_shards.write_atomically
    for module in (clean_shards, preparing, preparing.write_shard.__globals__):
        monkeypatch.setitem(module if isinstance(module, dict) else vars(module), "write_atomically", dies)
    with pytest.raises(Killed):
        prepare(config_of(raw), tmp_path)
    monkeypatch.undo()
    before = state_of(tmp_path)
    again = prepare(config_of(raw), tmp_path)
    assert {name: digest for name, digest in contents(again.folder).items() if not name.endswith(".partial")} == contents(prepared.folder)
    kept = {
        name: entry for name, entry in state_of(tmp_path).items() if not name.endswith((".partial", ".remembered.safetensors", ".parquet"))
    }
    assert all(kept[name] == entry for name, entry in before.items() if name in kept), "what was whole was not made again"


def test_a_killed_preparation_resumes_after_its_last_complete_part(raw, prepared, tmp_path):
    code = (
        "import sys; from pathlib import Path; from folders_of_text import config_of; from shared.data import clean_shards, prepare;"
        "whole = clean_shards.write_atomically; waits = lambda name: name == '00001.json' and sys.stdin.read();"  # until it is killed
        "clean_shards.write_atomically = lambda *a: (whole(*a), print(a[0].name, flush=True), waits(a[0].name));"
        "prepare.prepare(config_of(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(raw), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'tests' / 'support'}"}
    child = subprocess.Popen(command, **pipes, cwd=CHECKOUT, env=environment)
    while (line := child.stdout.readline().strip()) != "00001.json":
        assert line, "the child ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    assert child.wait(180) == -signal.SIGKILL
    folder = tmp_path / prepared.folder.name
    assert (folder / "clean/00001.json").exists() and not (folder / "clean/complete.json").exists()
    first = (folder / "clean/00000.parquet").stat().st_mtime_ns
    again = prepare(config_of(raw), tmp_path)
    assert contents(again.folder).items() >= contents(prepared.folder).items()
    assert (folder / "clean/00000.parquet").stat().st_mtime_ns == first < time.time_ns()


def test_a_damaged_shard_is_named_and_made_again_once_deleted(raw, tmp_path):
    done = prepare(config_of(raw), tmp_path)
    path = done.folder / "training" / f"00001{ENDING}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ShardError, match=f"00001{ENDING} is cut short"):
        prepare(config_of(raw), tmp_path)
    path.unlink()
    prepare(config_of(raw), tmp_path)
    assert path.read_bytes() == whole


# Other inputs.


@pytest.mark.parametrize("names", [["<|stop|>"], ["<|endoftext|>", "<|stop|>"]], ids=["no usual name", "a usual name beside it"])
def test_what_is_found_prepared_ends_documents_as_it_did_when_it_was_made(raw, tmp_path, names):
    """The end token stands in the tokenizer_config.json beside a given tokenizer, and is not to be guessed the second time."""
    made = TextTokenizer.train(["some words"], 400, sentinels=0).to_json().replace("<|end|>", names[0])
    made = made.replace("<|mask|>", names[-1]) if len(names) > 1 else made
    (tmp_path / "tokenizer.json").write_text(made)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    config = config_of(raw, tokenizer=tmp_path)
    first, second = prepare(config, tmp_path / "out"), prepare(config, tmp_path / "out")
    assert first.tokenizer.end == second.tokenizer.end == "<|stop|>"
    assert second.training.document(0)[-1] == second.tokenizer.end_id == first.tokenizer.end_id
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if len(names) > 1:
        assert prepare(config, tmp_path / "out").folder != first.folder


def test_a_given_tokenizer_is_used_and_another_one_is_another_folder(raw, prepared, tmp_path):
    TextTokenizer.train(["other words"], 400, sentinels=0).save(tmp_path / "tokenizer.json")
    config = config_of(raw, tokenizer=tmp_path / "tokenizer.json")
    other = prepare(config, tmp_path / "out")
    assert other.tokenizer.identity == TextTokenizer.load(tmp_path).identity != prepared.tokenizer.identity
    assert other.training.token_count > prepared.training.token_count


def test_one_file_is_split_by_its_end(tmp_path):
    text = "".join(f"line {i} of the only file, with ümlauts\n" for i in range(300))
    (tmp_path / "only.txt").write_text(text, encoding="utf-8")
    done = prepare(config_of(tmp_path / "only.txt"), tmp_path / "out")
    spelt = [done.tokenizer.decode(store.document(0)) for store in (done.training, done.held_out)]
    assert "".join(spelt) == text and 0.04 < len(spelt[1]) / len(text) < 0.06


@pytest.mark.parametrize("stages", [("length",), ("length", "exact duplicates")])
def test_held_out_documents_that_are_in_the_training_text_too_are_counted(tmp_path, stages):
    """Every third document is written again, with more white space at its end; which side a file is on, its name decides."""
    (tmp_path / "raw").mkdir()
    for number in range(60):
        text = "".join(f"line {number * 7 % 20 if number % 3 else number} {i} of one of the files\n" for i in range(20))
        (tmp_path / "raw" / f"{number:02}.txt").write_text(text + "\n" * (number % 3))
    config = replace(config_of(tmp_path / "raw"), cleaning=CleaningConfig(stages=stages), held_out_share=0.3)
    sides = split(list(open_source(Source(str(tmp_path / "raw"), suffixes=(".txt",)), lambda *_: None)), 0.3)
    training = {document.content.strip() for document in sides.training}
    expected = sum(document.content.strip() in training for document in sides.held_out)
    assert expected > 3
    for folder in ("first", "again"):  # made, and made again where everything but the end was there
        report = prepare(config, tmp_path / "out").report
        assert report.held_out_in_training == (0 if "exact duplicates" in stages else expected)
        [done] = (tmp_path / "out").glob("*/clean/complete.json")
        done.unlink()


def test_several_sources_are_one_text_without_repetition(raw, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"content": text}) + "\n" for text in ((raw / "file003.py").read_text(), "new words\n" * 30)), encoding="utf-8"
    )
    sources = (Source(str(raw)), Source(str(tmp_path / "rows.jsonl"), text_field="content"))
    done = prepare(replace(config_of(raw), sources=sources), tmp_path / "out")
    assert "rows.jsonl/rows.jsonl:1" in [example.name for example in done.report.examples()]
    assert done.report.documents_out == 121


def test_an_empty_corpus_after_cleaning_is_refused_with_the_reasons(raw, tmp_path):
    wanted = "left no text to train on: of 122 documents, 0 were kept. Dropped: 122 shorter than 1000000 bytes"
    with pytest.raises(CourseError, match=wanted) as said:
        prepare(config_of(raw, cleaning=CleaningConfig(min_bytes=10**6)), tmp_path)
    assert "held_out_share" not in str(said.value)


def test_where_nothing_can_be_read_each_file_is_named_with_its_reason(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in {"bin.dat": b"\0\1", "empty.txt": b"", "latin.txt": b"caf\xe9", **{f"{i}.txt": b"" for i in range(4)}}.items():
        (folder / name).write_bytes(content)
    with pytest.raises(CourseError, match=f"^Nothing in {folder} could be read: 0.txt is empty; ") as said:
        prepare(config_of(folder), tmp_path / "out")
    for part in ("bin.dat is a binary file; ", "latin.txt is not UTF-8; and 2 more. Convert it to UTF-8"):
        assert part in str(said.value)
    assert "Cleaning" not in str(said.value) and "held_out_share" not in str(said.value)


def test_an_empty_split_is_refused_with_the_share_to_change(tmp_path):
    (tmp_path / "only.txt").write_text("x" * 70)
    config = replace(config_of(tmp_path / "only.txt"), held_out_share=0.001)
    wanted = "^Of 1 document that cleaning kept, nothing is left to hold out: .* a larger held_out_share than 0.001"
    with pytest.raises(CourseError, match=wanted):
        prepare(config, tmp_path / "out")


def test_values_that_cannot_be_are_refused():
    for changes, said in (
        ({"sources": ()}, "no sources"),
        ({"held_out_share": 1.0}, "held_out_share is 1.0"),
        ({"workers": -1}, "workers is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            PrepareConfig(**changes)


def test_what_was_prepared_can_be_trained_on(prepared):
    loader = PackedLoader(prepared.training, seq=64, batch_size=4, epochs=1)
    count = sum(int((batch["targets"] >= 0).sum()) for step in loader for batch in step)
    assert count == prepared.training.token_count - len(prepared.training)
    held_out = EvaluationLoader(prepared.held_out, seq=64, batch_size=4)
    first = sum(prepared.tokenizer.byte_lengths[prepared.held_out.document(i)[0]] for i in range(len(prepared.held_out)))
    assert held_out.byte_count(prepared.tokenizer.byte_lengths) == prepared.held_out.byte_counts.sum() - first
    assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(held_out, held_out, strict=True))
