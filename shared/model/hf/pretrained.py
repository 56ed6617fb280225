"""Chapter 02. Load and save pretrained weights: convert from and to a Hugging Face checkpoint (state dict, `config.json`).

What does not fit is refused before a weight is read: the names and shapes in the files are held against those that the
configuration asks for, and everything missing, extra or misshapen is named.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.hf.files import INDEX, SINGLE, PretrainedError, TensorFolder, read_json, write_json, write_tensors
from shared.model.hf.format import FileTensor, Format
from shared.model.hf.generation import TokenIds, every_id, read_token_ids, require_token_ids, write_generation
from shared.model.hf.registry import read_config, write_config
from shared.model.init import allocate
from shared.model.transformer import TIED_TO, TransformerModel

LISTED = 12  # names in a refusal


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    builders: Builders = Builders(),  # noqa: B008 (frozen)
) -> TransformerModel:
    """The model in a folder of Hugging Face's format. It is in training mode, as every new module is.

    Args:
        folder: holds config.json and model.safetensors, or several files with their index.
        dtype: of the parameters, whatever the files hold.
        device: where they are put, one tensor at a time.
        builders: what the model's pieces are made of.

    Raises:
        PretrainedError: no such folder, no or damaged files, a model that is not built here, tensors that do not fit.
    """
    folder = Path(folder)
    known, config, token_ids = read_folder(folder)
    files = TensorFolder(folder)
    if known.tied_by_file:
        config = replace(config, tie_word_embeddings=not set(known.tied) & set(files.shapes))
    with torch.device("meta"):
        model = TransformerModel(config, builders)
    model.token_ids = token_ids
    stored = {entry.name: entry for entry in known.tensors(model.config)}
    if extra := not_in_format(stored.values(), model):
        raise PretrainedError(
            f"No tensor of the {known.model_type} format holds {listed(extra)}, so loading would leave it without values: load the plain "
            "model, then add what is not in its files."
        )
    in_files = names_in_files(known, stored, files, config)
    require_fit(folder, stored, in_files, files, logical_parameters(model))
    allocate(model.to(dtype), device)
    parameters = logical_parameters(model)
    with torch.no_grad():
        for name, tensor in files.read(in_files):
            entry = stored[in_files[name]]
            for ours, value in zip(entry.views(parameters), entry.unpack(tensor), strict=True):
                ours.copy_(value)
        require_equal_tied(folder, known, config, files, parameters)
    return model


def logical_parameters(model: TransformerModel) -> dict[str, Tensor]:
    """Every parameter once, by the name that does not depend on tying."""
    return {model.logical_name(name): parameter for name, parameter in model.named_parameters()}


def not_in_format(stored: Iterable[FileTensor], model: TransformerModel) -> list[str]:
    """Parameters, buffers and entries of stacks that no tensor of a format holds."""
    parts: dict[str, set[int | None]] = {}
    for entry in stored:
        for name in entry.ours:
            parts.setdefault(name, set()).add(entry.part)
    state = {model.logical_name(name): value for name, value in model.state_dict().items()}
    found = [name for name in state if name not in parts]
    for name, held in parts.items():
        if name in state and None not in held:
            found += [f"{name}[{number}]" for number in range(len(state[name])) if number not in held]
    return found


def require_equal_tied(folder: Path, known: Format, config: ModelConfig, files: TensorFolder, parameters: dict[str, Tensor]) -> None:
    """Refuse a file whose head differs from the embedding that its configuration ties it to."""
    repeated = [name for name in known.tied if name in files.shapes and config.tie_word_embeddings]
    for name, tensor in files.read(repeated):
        embedding = parameters[TIED_TO]
        if not torch.equal(tensor.to(embedding.device, embedding.dtype), embedding):
            raise PretrainedError(
                f"config.json in {folder} ties the head to the embedding, but {name} in the file is another matrix: set "
                "tie_word_embeddings to false to keep it, or remove the tensor."
            )


def read_folder(folder: Path) -> tuple[Format, ModelConfig, dict[str, Any]]:
    """The format and the configuration that a folder describes, and its special token ids."""
    if not folder.is_dir():
        raise PretrainedError(f"{folder} is no folder: give the one that holds a model's config.json.")
    raw = read_json(folder / "config.json")
    try:
        known, config = read_config(raw)
    except (ValueError, TypeError) as error:
        raise PretrainedError(f"{folder / 'config.json'}: {error}") from None
    return known, config, read_token_ids(known, folder, raw)


def names_in_files(known: Format, stored: dict[str, FileTensor], files: TensorFolder, config: ModelConfig) -> dict[str, str]:
    """Name in the files -> name in the format, without what no model reads. Files of the bare model lack the prefix."""
    bare = known.prefix and not any(name.startswith(known.prefix) for name in files.shapes)
    names = {}
    for name in files.shapes:
        full = known.prefix + name if bare and not name.startswith("lm_head") else name
        for old, new in known.renamed.items():
            full = full.removesuffix(old) + new if full.endswith(old) else full
        repeated = full in known.tied and config.tie_word_embeddings
        if not repeated and (full in stored or not any(re.fullmatch(pattern, full) for pattern in known.ignored)):
            names[name] = full
    return names


def require_fit(
    folder: Path, stored: dict[str, FileTensor], in_files: dict[str, str], files: TensorFolder, parameters: dict[str, Tensor]
) -> None:
    """Refuse files that do not hold just the tensors that the configuration asks for."""
    present = {full: files.shapes[name] for name, full in in_files.items()}
    wanted = {name: packed_shape(entry, parameters) for name, entry in stored.items()}
    misshapen = [
        f"{name} is {list(present[name])}, not {list(wanted[name])}" for name in wanted if present.get(name, wanted[name]) != wanted[name]
    ]
    problems = []
    for title, names in (("missing", set(wanted) - set(present)), ("extra", set(present) - set(wanted)), ("misshapen", misshapen)):
        if names:
            problems.append(f"{title}: {listed(names)}")
    if problems:
        raise PretrainedError(f"The tensors in {folder} do not match its config.json. {'; '.join(problems)}.")


def packed_shape(entry: FileTensor, parameters: dict[str, Tensor]) -> tuple[int, ...]:
    return tuple(entry.pack([torch.empty(view.shape, device="meta") for view in entry.views(parameters)]).shape)


def listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def save_pretrained(
    model: TransformerModel,
    folder: Path | str,
    *,
    model_type: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    token_ids: TokenIds | None = None,
) -> None:
    """Write a whole model into a folder that transformers loads. A tied head is written once, as the embedding.

    Every file is put in place whole, `config.json` last; files of another model that were there are removed.

    Args:
        model: with its embedding, all its blocks and its head.
        folder: made if it is not there.
        model_type: the format; None for the first that can hold the model. GPT-3's dense models are of type gpt2.
        max_shard_bytes: the weights are split into files of at most this size.
        token_ids: the tokenizer's `eos_token_id`, `bos_token_id`, `pad_token_id`, by these names, those that it has; None for the ones
            that the model was imported with. Without an end token, `generate` of transformers stops at its longest text only.

    Raises:
        ValueError: no format can describe the model, part of it is absent or sharded, it has parameters or buffers that the format
            does not name, or no row for one of the ids.
    """
    folder = Path(folder)
    known, raw = write_config(model.config, model_type)
    require_token_ids(token_ids or {}, model.config)
    ids = every_id(model.token_ids if token_ids is None else token_ids, model.config)
    parameters = {name: parameter.detach() for name, parameter in logical_parameters(model).items()}
    stored = {entry.name: entry for entry in known.tensors(model.config)}
    if sharded := sorted(name for name, parameter in logical_parameters(model).items() if hasattr(parameter, "sharding")):
        raise ValueError(f"This process holds only a part of {listed(set(sharded))}, which is sharded: save a model with the full weights.")
    if absent := {name for entry in stored.values() for name in entry.ours} - set(parameters):
        raise ValueError(f"Only a whole model can be saved in this format; this one lacks {listed(absent)}.")
    if extra := not_in_format(stored.values(), model):
        raise ValueError(
            f"No tensor of the {known.model_type} format holds {listed(extra)}, and without it this would be another model: merge an "
            "adapter into the weights it belongs to, or take it out."
        )
    sizes = {name: sum(view.nbytes for view in entry.views(parameters)) for name, entry in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    written = write_tensors(
        folder, sizes, lambda name: stored[name].pack([view.cpu() for view in stored[name].views(parameters)]), max_shard_bytes
    )
    for old in [*folder.glob("model*.safetensors"), folder / INDEX, folder / SINGLE]:
        if old.name not in written:
            old.unlink(missing_ok=True)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    write_generation(folder, ids, model.config)
    write_json(folder / "config.json", raw | ids | {"dtype": dtype})
