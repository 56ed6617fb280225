"""Checkpoints whose content is wrong and whose checksums are right: change what a folder holds, and sign it again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shared.engine.checkpoint.folder import MANIFEST, STATE, fingerprint

Change = Callable[[Path], None]  # what is done to a checkpoint's folder


def sign(folder: Path) -> None:
    """Make the manifest say what the files are."""
    files = {path.name: fingerprint(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps(files))


def resigned(change: Change) -> Change:
    def changed(folder: Path) -> None:
        change(folder)
        sign(folder)

    return changed


def text(content: str, name: str = STATE) -> Change:
    return resigned(lambda folder: (folder / name).write_text(content))


def state(edit: Callable[[dict], Any]) -> Change:
    """edit(state) changes what `state.json` holds, or returns what it is to hold."""

    def change(folder: Path) -> None:
        content = json.loads((folder / STATE).read_text())
        edited = edit(content)
        (folder / STATE).write_text(json.dumps(content if edited is None else edited))

    return resigned(change)


def tensors(name: str, edit: Callable[[dict], Any], metadata: Callable[[dict], Any] | None = None) -> Change:
    """edit(tensors) changes those of a file, metadata(strings) what its header says beside them."""

    def change(folder: Path) -> None:
        path = folder / f"{name}.safetensors"
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
        content = load_file(path)
        edit(content)
        if metadata:
            metadata(said)
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, path, metadata=said or None)

    return resigned(change)


def set_at(*path: Any) -> Callable[[dict], None]:
    """set_at("a", 0, value): content["a"][0] = value."""
    *keys, last, value = path

    def edit(content: Any) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return edit


def drop(*path: Any) -> Callable[[dict], None]:
    *keys, last = path

    def edit(content: Any) -> None:
        for key in keys:
            content = content[key]
        del content[last]

    return edit
