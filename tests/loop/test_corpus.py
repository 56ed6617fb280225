"""The embedded corpus is the recorded one, and bad text sources are refused in one sentence."""

import dataclasses
from pathlib import Path

import pytest

from shared import corpus
from shared.corpus import Document


@pytest.fixture(scope="module")
def embedded():
    return corpus.embedded_corpus()


def test_the_embedded_corpus_is_what_was_recorded(embedded):
    assert len(embedded.training) + len(embedded.held_out) == sum(package.files for package in corpus.EMBEDDED)
    assert 0.03 < len(embedded.held_out_bytes()) / len(embedded.training_bytes()) < 0.09
    names = {document.name for document in embedded.training}
    assert not names & {document.name for document in embedded.held_out}
    assert not any("/tests/" in name for name in names)


def test_documents_end_with_a_zero_byte_that_they_do_not_contain(embedded):
    stream = embedded.held_out_bytes()
    assert stream[-1] == 0 and (stream == 0).sum() == len(embedded.held_out)


def test_another_version_is_refused_with_the_command_that_mends_it():
    other = dataclasses.replace(corpus.EMBEDDED[3], version="0.0.1")
    with pytest.raises(corpus.CorpusError, match=r"needs jinja2 0\.0\.1, found 3\.1\.6: run `make install`"):
        corpus.read_package(other)
    with pytest.raises(corpus.CorpusError, match="needs not-there 1"):
        corpus.read_package(dataclasses.replace(other, name="not-there", version="1"))


def test_a_changed_file_is_noticed():
    package = corpus.EMBEDDED[3]
    documents = corpus.read_package(package)
    changed = [Document(documents[0].name, documents[0].content + b"#"), *documents[1:]]
    with pytest.raises(corpus.CorpusError, match=r"jinja2 3\.1\.6 are not those of its wheel"):
        corpus.verified(package, changed)


def test_a_documents_side_does_not_depend_on_the_others():
    documents = [Document(f"file{i}", b"text") for i in range(200)]
    held_out = {d.name for d in corpus.split(documents).held_out}
    assert {d.name for d in corpus.split(documents[:100]).held_out} == {n for n in held_out if int(n[4:]) < 100}
    assert 2 <= len(held_out) <= 22  # 5 % of 200, within four standard deviations


def test_a_folder_is_read_without_its_binary_and_empty_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file's side depends on its name, and the temporary folder's is another each time
    (tmp_path / "sub").mkdir()
    for i in range(100):
        (tmp_path / "sub" / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty").touch()
    found = corpus.read_files([Path()])
    assert len(found.training) + len(found.held_out) == 100 and found.held_out


def test_a_single_file_is_split_by_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 201)))
    found = corpus.read_files([path])
    assert found.training[0].content + found.held_out[0].content == path.read_bytes()
    assert len(found.held_out[0].content) == 10


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"", "is empty"), (b"MZ\0\0", "is a binary file")],
)
def test_a_bad_file_is_named(tmp_path, content, said):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(corpus.CorpusError, match=f"text.txt {said}"):
        corpus.read_files([path])


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(corpus.CorpusError, match="no text in"):
        corpus.read_files([tmp_path])
