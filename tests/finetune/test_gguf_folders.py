"""Folders that GGUF files are unpacked into: one a file, also where two files have one name."""

import shutil
from pathlib import Path

from test_gguf import make_folder

from shared.finetune.gguf.unpack import unpacked
from shared.finetune.gguf.write import save_gguf


def test_two_files_of_one_name_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, files = [], [tmp_path / name / "model.gguf" for name in ("one", "two")]
    for file, kind in zip(files, ("f32", "q8_0"), strict=True):
        save_gguf(make_folder(tmp_path / "made" / kind, "Llama", {"num_hidden_layers": 1}), file, kind)
    folders = [unpacked(file, said.append) for file in files]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert folders[0] == Path("runs/pretrained/model") != folders[1] and weights[0] != weights[1]
    assert [unpacked(file, said.append) for file in files] == folders and len(said) == 2, "neither replaces the other"
    assert [(folder / "model.safetensors").read_bytes() for folder in folders] == weights
    shutil.rmtree(tmp_path / "one")
    assert unpacked(files[1], said.append) == folders[1] and len(said) == 2
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    assert unpacked(tmp_path / "three/model.gguf", said.append) == folders[0] and len(said) == 3, "whose file is gone"
