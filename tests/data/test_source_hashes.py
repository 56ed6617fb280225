"""Prepared text is found again by the content of its sources: their hashes, which are kept between runs, and what those believe."""

import hashlib
import json
import math
import os
import time
from pathlib import Path

from folders_of_text import config_of, state_of, write_folder

from shared.data import sources
from shared.data.prepare import prepare


def test_text_is_known_by_its_content_and_not_by_its_times(tmp_path):
    """A touched file prepares nothing again; another byte does, also where a tool has put the size and the time of modification back."""
    folder, output = write_folder(tmp_path / "code"), tmp_path / "prepared"
    first = prepare(config_of(folder), output)
    before = state_of(first.folder)
    os.utime(folder / "file000.py", (10**9, 10**9))
    assert prepare(config_of(folder), output).folder == first.folder and state_of(first.folder) == before
    change_a_byte(folder / "file000.py")
    assert prepare(config_of(folder), output).folder != first.folder


def change_a_byte(path: Path) -> None:
    found = path.stat()
    path.write_bytes(path.read_bytes().replace(b"return", b"Return", 1))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def wait_for_a_tick(file: Path) -> None:
    """Until the file system's clock has moved since the file was written."""
    probe = file.with_suffix(".probe")
    probe.touch()
    while probe.stat().st_ctime_ns <= file.stat().st_ctime_ns:
        time.sleep(0.001)
        probe.touch()


def test_a_kept_hash_spares_the_reading_and_is_not_believed_after_a_write(tmp_path, monkeypatch):
    file, kept, read = tmp_path / "text.py", tmp_path / "kept.json", []
    file.write_text("return 1")
    monkeypatch.setattr(sources, "SETTLED", -math.inf)

    def digest() -> str:
        again = sources.Digests(kept)
        found = again.of(file)
        again.save()
        return found

    whole = sources.hashlib.file_digest
    monkeypatch.setattr(sources.hashlib, "file_digest", lambda *arguments: (read.append(1), whole(*arguments))[1])
    first = digest()
    assert digest() == first == hashlib.sha256(b"return 1").hexdigest() and len(read) == 1
    wait_for_a_tick(file)  # or the change would leave no trace
    change_a_byte(file)
    assert digest() == hashlib.sha256(b"Return 1").hexdigest() and len(read) == 2
    for damaged in ("{", "[]", json.dumps({str(file): 1})):
        kept.write_text(damaged)
        assert digest() == hashlib.sha256(b"Return 1").hexdigest()


def test_the_hash_of_a_file_that_was_just_written_is_not_kept(tmp_path):
    """The next write may fall into the same tick of the file system's clock, and would leave no trace in its times."""
    (tmp_path / "text.py").write_text("x = 1")
    found = sources.Digests(tmp_path / "kept.json")
    found.of(tmp_path / "text.py")
    found.save()
    assert not (tmp_path / "kept.json").exists()


def test_hashes_that_cannot_be_kept_stop_nothing(tmp_path, monkeypatch):
    """As in a folder of finished text that can only be read, whose sources were copied since."""
    monkeypatch.setattr(sources, "SETTLED", -math.inf)
    folder, output = write_folder(tmp_path / "code"), tmp_path / "prepared"
    (output / "sources.json").mkdir(parents=True)
    assert prepare(config_of(folder), output).folder == prepare(config_of(folder), output).folder
