"""Chapter 10. A GGUF file as a folder of Hugging Face's format, which everything else here reads: made once, kept in `runs/pretrained`.

Weights are put out as float32, whatever the file holds: a file of 98 MB in four bits becomes a folder of 538 MB.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shared.finetune.gguf.file import GgufFile
from shared.finetune.gguf.models import permuted, read_gguf_config, require_same, tensor_names
from shared.finetune.gguf.packaged import located
from shared.finetune.gguf.tokenizer import read_tokenizer, templates, token_ids, tokenizer_config
from shared.folder_lock import FolderLock
from shared.model.config import ModelConfig
from shared.model.hf.files import plan_files, read_json, write_generation, write_json, write_tensors

FOLDER, SOURCE = Path("runs/pretrained"), "gguf.json"
LARGEST = 5 * 10**9  # bytes of a file of weights


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # `course sample` writes answers alone to the output


def unpacked(path: Path, tell: Callable[[str], None] = say) -> Path:
    """The folder of a GGUF file, or of a name in PACKAGED; made if it is not there, or the file has changed. Of two files of one name, the
    second gets a folder whose name has a hash of its path.

    Raises:
        PretrainedError: a file that is not understood here.
        SettingError: no such package or file.
    """
    file = located(path)
    status = file.stat()
    source = {"file": str(file.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}
    if is_from(folder := folder_for(file), source):
        return folder
    with FolderLock(FOLDER, wait=True):
        folder = folder_for(file)  # another process may have taken the name since
        if not is_from(folder, source):
            for left in FOLDER.glob("*.partial"):  # of processes that were killed: the lock is this one's
                shutil.rmtree(left, ignore_errors=True)
            made = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
            tell(f"{file.name} is unpacked once, into {folder}.")
            unpack(GgufFile(file), made)
            write_json(made / SOURCE, source)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return folder


def folder_for(file: Path) -> Path:
    """Named after the file, unless that is the folder of another one that still exists."""
    folder, path = FOLDER / file.stem, str(file.resolve())
    other = read_json(folder / SOURCE)["file"] if (folder / SOURCE).is_file() else path
    second = FOLDER / f"{file.stem}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    return second if other != path and (Path(other).exists() or second.exists()) else folder


def is_from(folder: Path, source: dict) -> bool:
    return (folder / SOURCE).is_file() and read_json(folder / SOURCE) == source


def shape_of(path: Path) -> ModelConfig:
    """The model in a GGUF file, or of a name in PACKAGED, by its metadata alone."""
    return read_gguf_config(GgufFile(located(path)))[0]


def unpack(file: GgufFile, folder: Path) -> None:
    """Write config.json, the weights, the tokenizer and the chat template of a GGUF file into a new folder.

    Raises:
        PretrainedError: what is not understood is named, before anything is written.
    """
    config, raw = read_gguf_config(file)
    model_type = raw["model_type"]
    where = tensor_names(model_type, config)
    require_same(file, {theirs for theirs, _ in where.values()})
    tokenizer = read_tokenizer(file)
    folder.mkdir(parents=True)
    like = {name: torch.empty(shape_in(file, *where[name]), device="meta") for name in where}
    plan = plan_files({name: tensor.nbytes for name, tensor in like.items()}, LARGEST)
    write_tensors(folder, plan, like, lambda name: tensor_of(file, name, where, model_type, config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    for name, text in templates(file).items():
        target = folder / "additional_chat_templates" / f"{name}.jinja" if name else folder / "chat_template.jinja"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    ids = token_ids(file)
    write_generation(folder, ids, config)
    write_json(folder / "config.json", raw | ids | {"dtype": "float32"})


def shape_in(file: GgufFile, name: str, expert: int | None) -> tuple[int, ...]:
    return file.shapes[name] if expert is None else file.shapes[name][1:]


def tensor_of(file: GgufFile, name: str, where: dict[str, tuple[str, int | None]], model_type: str, config: ModelConfig) -> Tensor:
    """A tensor by its name in Hugging Face's files."""
    return permuted(name, file.read(*where[name]), model_type, config, back=True)
