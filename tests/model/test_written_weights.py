"""Weights written into a folder: a disk that is full leaves the old files as they were and nothing half written; then they are replaced."""

import errno
import os

import pytest
import torch
from safetensors.torch import load_file

from shared.model.hf.files import INDEX, SINGLE, plan_files, write_tensors
from shared.tensor_files import stream_tensors


def written(folder, tensors, longest=10**9):
    plan = plan_files({name: tensor.nbytes for name, tensor in tensors.items()}, longest)
    write_tensors(folder, plan, tensors, tensors.__getitem__)


def test_a_full_disk_leaves_the_old_weights_and_no_part_of_the_new_ones(tmp_path, monkeypatch):
    old, new = {"a": torch.zeros(3), "b": torch.zeros(5)}, {"a": torch.ones(3), "b": torch.ones(5)}
    written(tmp_path, old)

    def no_room(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        written(tmp_path, new)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE] and torch.equal(load_file(tmp_path / SINGLE)["b"], old["b"])
    written(tmp_path, new)
    assert torch.equal(load_file(tmp_path / SINGLE)["b"], new["b"])


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """After a crash a name without its numbers would pass for the model."""
    called, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (called.append("fsync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (called.append("replace"), replace(*names)))
    written(tmp_path, {"a": torch.zeros(3)})
    assert called == ["fsync", "replace"]


def test_files_of_the_model_that_was_there_before_are_removed(tmp_path):
    tensors = {"a": torch.zeros(3), "b": torch.ones(5), "c": torch.ones(2)}
    written(tmp_path, tensors, longest=20)  # b is as long as a file may be
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    written(tmp_path, {"c": tensors["c"]})
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    written(tmp_path, tensors, longest=32)  # a and b are together just that long
    assert sorted(path.name for path in tmp_path.iterdir()) == [name.replace("00003", "00002") for name in names[:2]] + [INDEX]


def test_a_tensor_that_lies_in_strides_is_written_row_by_row(tmp_path):
    wide = torch.arange(12.0).view(3, 4).t()
    stream_tensors(tmp_path / "file", {"wide": wide}, lambda name: wide, {})
    assert torch.equal(load_file(tmp_path / "file")["wide"], wide)
