"""Kept hashes of files: one is kept only where a later write must show in the file's times."""

import hashlib
import os

from shared.data import sources
from shared.data.sources import Digests


def test_a_file_that_was_just_copied_with_its_old_time_is_not_kept(tmp_path):
    """As rsync and `cp -p` do: the time of modification is years ago, and the file may be written to again in this moment."""
    (tmp_path / "text").write_text("words")
    os.utime(tmp_path / "text", (10**9, 10**9))
    found = Digests(tmp_path / "kept.json")
    assert found.of(tmp_path / "text") == hashlib.sha256(b"words").hexdigest() and not found.kept


def test_the_moment_that_counts_is_the_one_before_the_file_is_read(tmp_path, monkeypatch):
    """Reading may take longer than `SETTLED`, and the first part of the file may be written to again meanwhile."""
    (tmp_path / "text").write_text("words")
    now, whole = (tmp_path / "text").stat().st_ctime, hashlib.file_digest

    def slow(*arguments):
        monkeypatch.setattr(sources.time, "time", lambda: now + 100)
        return whole(*arguments)

    monkeypatch.setattr(sources.time, "time", lambda: now + 1)
    monkeypatch.setattr(sources.hashlib, "file_digest", slow)
    found = Digests(tmp_path / "kept.json")
    assert found.of(tmp_path / "text") == hashlib.sha256(b"words").hexdigest() and not found.kept
    found.of(tmp_path / "text")
    assert found.kept
