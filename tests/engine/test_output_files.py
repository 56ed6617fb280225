"""Writing a run's files: what the disk refuses is a sentence, what has another cause stays what it is, and no half of a file is left."""

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from shared.course.errors import CourseError
from shared.output_files import write_atomically, writing


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("a word"), "a word"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left on device"),
        (SafetensorError("IoError(Disk quota exceeded (os error 122))"), "Disk quota exceeded"),
    ],
)
def test_what_the_disk_refuses_is_a_sentence_with_the_place_and_the_reason(tmp_path, error, reason):
    with pytest.raises(CourseError, match="free space there or move what is in its way") as said, writing(tmp_path / "model"):
        raise error
    assert str(said.value).startswith(f"{tmp_path / 'model'} cannot be written ({reason})") and said.value.__cause__ is error


def test_an_error_of_another_cause_stays_what_it_is(tmp_path):
    with pytest.raises(SafetensorError, match="InvalidTensorView|dtype|shape"), writing(tmp_path):
        raise SafetensorError("Error while serializing: InvalidTensorView")
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("name")
    with writing(tmp_path):
        save({"x": torch.zeros(2)})


def test_a_write_that_fails_leaves_the_old_file_and_no_half_of_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "a.json"
    write_atomically(path, b"old")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CourseError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [each.name for each in path.parent.iterdir()] == ["a.json"]
