"""Chapter 02. Files of a Hugging Face model folder: safetensors (one, or shards with an index), JSON, and the special token ids in it.

Nothing here unpickles anything. What a file does not say of `eos_token_id` and the others, transformers fills in with the defaults of its
classes, such as 2 for the end token of every LLaMA: `generate` then stops at an ordinary token, or never. So each id is written, to
`config.json` and `generation_config.json`, and one that a model does not have is null.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.model.config import ModelConfig
from shared.model.hf.format import ConfigJson, Format
from shared.output_files import write_atomically
from shared.tensor_files import stream_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLING = (  # keys of generation_config.json that say how to draw tokens
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "no_repeat_ngram_size", "num_beams", "length_penalty",
)  # fmt: skip


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

    settings: keys of config.json that say how the files keep tensors, and nothing of the model.
    """

    settings: tuple[str, ...] = ()

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

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """A slice of a tensor: start and stop in each dimension. Nothing else of it is read."""
        with safe_open(self.file_of[name], "pt") as file:
            return file.get_slice(name)[tuple(slice(*each) for each in ranges)]


def plan_files(sizes: dict[str, int], longest: int) -> dict[str, list[str]]:
    """Name of a file -> the tensors in it: at most `longest` bytes each, more where one tensor is larger.

    Args:
        sizes: name -> bytes, in the order in which tensors are assigned to files.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > longest:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, start=1)}


def write_tensors(folder: Path, plan: dict[str, list[str]], like: dict[str, Tensor], make: Callable[[str], Tensor]) -> None:
    """Write tensors into files, each put in place whole, and an index if there are several; remove files of another model.

    Args:
        folder: exists.
        plan: as `plan_files` returns it.
        like: name -> a tensor of the same shape and dtype, perhaps on the meta device.
        make: makes a tensor when it is due, so that one is held at a time.
    """
    for file_name, names in plan.items():
        unfinished = folder / f"{file_name}.{os.getpid()}.partial"
        try:
            stream_tensors(unfinished, {name: like[name] for name in names}, make, metadata={"format": "pt"})
            os.replace(unfinished, folder / file_name)
        except OSError:
            unfinished.unlink(missing_ok=True)  # or it would take the room that the next attempt needs
            raise
    if several := len(plan) > 1:
        weight_map = {name: file_name for file_name, names in plan.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(tensor.nbytes for tensor in like.values())}, "weight_map": weight_map})
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if old.name not in plan and not (several and old.name == INDEX):
            old.unlink(missing_ok=True)


def write_json(path: Path, raw: dict) -> None:
    """Put a JSON file in place whole."""
    write_atomically(path, json.dumps(raw, indent=2).encode() + b"\n")


TokenIds = Mapping[str, int | list[int] | None]
GENERATION = "generation_config.json"
KEYS = ("eos_token_id", "bos_token_id", "pad_token_id")
START = "decoder_start_token_id"  # of an encoder-decoder


def read_token_ids(known: Format, folder: Path, raw: ConfigJson) -> dict[str, int | list[int] | None]:
    """The ids that a folder gives: in generation_config.json, in its config.json (`raw`), or by what transformers assumes in its format."""
    said = raw | (read_json(folder / GENERATION) if (folder / GENERATION).exists() else {})
    return {key: said.get(key, known.token_ids.get(key)) for key in (*KEYS, START) if key != START or START in said}


def require_token_ids(token_ids: TokenIds, config: ModelConfig) -> None:
    """Raise ValueError for an id that the model does not have, and for a name that is neither in KEYS nor START."""
    for key, value in token_ids.items():
        if key not in (*KEYS, START):
            raise ValueError(f"token_ids has {key!r}: give {', '.join(KEYS)} or {START}.")
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not 0 <= number < config.vocab_size:
                raise ValueError(f"{key} is {value}, and the model's ids are 0 to {config.vocab_size - 1}.")


def every_id(token_ids: TokenIds, config: ModelConfig) -> ConfigJson:
    """The ids as the files have them. An encoder-decoder starts with padding, as T5 does, unless something else is given."""
    ids = dict.fromkeys(KEYS) | dict(token_ids)
    return {START: ids["pad_token_id"]} | ids if config.architecture == "encoder-decoder" else ids


def write_generation(folder: Path, ids: ConfigJson, config: ModelConfig) -> None:
    """Write generation_config.json: the ids, and the longest text that the model takes. An encoder generates nothing and has none."""
    if config.architecture == "encoder":
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        write_json(folder / GENERATION, ids | {"max_length": config.max_position_embeddings})


def keep_sampling(start: Path, folder: Path) -> None:
    """Copy how a model's makers sample from it, from the generation_config.json of `start` to that of `folder`, where both have one."""
    if (start / GENERATION).exists() and (folder / GENERATION).exists():
        said = read_json(start / GENERATION)
        write_json(folder / GENERATION, read_json(folder / GENERATION) | {key: said[key] for key in SAMPLING if key in said})
