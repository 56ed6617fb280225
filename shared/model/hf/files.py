"""Chapter 02. Safetensors files of a model's folder: one, or shards with an index. Nothing here unpickles anything."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.output_files import write_atomically
from shared.tensor_files import save_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class PretrainedError(ValueError):
    """A folder that cannot be read as a model: what is wrong, where, and what to do."""


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        PretrainedError: no such file, or no JSON object in it.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PretrainedError(f"{path.parent} has no {path.name}: give the folder that holds a model's {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} cannot be read ({error}): copy it again.") from None
    if not isinstance(raw, dict):
        raise PretrainedError(f"{path} holds no JSON object: copy it again.")
    return raw


class TensorFolder:
    """The tensors of a folder by name, read one at a time. Opening it reads the headers only.

    Raises:
        PretrainedError: no safetensors there, a file of the index is missing, or a file is cut short or none of its kind.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self.paths():
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                        self.file_of[name], self.shapes[name] = path, tuple(file.get_slice(name).get_shape())
            except FileNotFoundError:
                raise PretrainedError(f"{path} is missing, and {INDEX} lists it: copy it too.") from None
            except (SafetensorError, OSError) as error:
                raise PretrainedError(f"{path} is no complete safetensors file ({error}): copy it again.") from None

    def paths(self) -> list[Path]:
        index = self.folder / INDEX
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) and Path(name).name == name for name in listed.values()):
                raise PretrainedError(f"{index} has no weight_map from tensors to files of this folder: copy it again.")
            return [self.folder / name for name in sorted(set(listed.values()))]
        if (self.folder / SINGLE).exists():
            return [self.folder / SINGLE]
        pickled = sorted(self.folder.glob("*.bin")) + sorted(self.folder.glob("*.pt")) + sorted(self.folder.glob("*.pth"))
        if pickled:
            raise PretrainedError(
                f"{self.folder} holds pickled weights ({pickled[0].name}), which can run code when they are opened. Convert them where "
                "you trust them: load them with transformers and call save_pretrained, which writes safetensors."
            )
        raise PretrainedError(f"{self.folder} has no weights: it needs {SINGLE}, or {INDEX} with its files.")

    def read(self, names: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
        """Each tensor in turn, so that one is held at a time."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        for path, its_names in by_file.items():
            with safe_open(path, "pt") as file:
                for name in its_names:
                    yield name, file.get_tensor(name)


def write_tensors(folder: Path, sizes: dict[str, int], make: Callable[[str], Tensor], longest: int) -> list[str]:
    """Write tensors into files of at most `longest` bytes (more where one tensor is larger), and an index if there are several.

    Args:
        folder: exists.
        sizes: name -> bytes, in the order in which they are written.
        make: makes a tensor when its file is due, so that one file's tensors are held at a time.
        longest: bytes.

    Returns:
        The names of the files, each put in place whole.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > longest:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    several = len(shards) > 1
    written, weight_map = [], {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else SINGLE
        unfinished = folder / f".{file_name}.{os.getpid()}"
        save_tensors({name: make(name).contiguous() for name in names}, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, folder / file_name)
        written.append(file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if several:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        written.append(INDEX)
    return written


def write_json(path: Path, raw: dict) -> None:
    """Put a JSON file in place whole."""
    write_atomically(path, json.dumps(raw, indent=2).encode() + b"\n")
