"""Chapter 02. Load and save pretrained weights: convert from and to a Hugging Face checkpoint (state dict, `config.json`).

What does not fit is refused before a weight is read: the names and shapes in the files are held against those that the
configuration asks for, and everything missing, extra or misshapen is named.

A model that is spread over processes (chapters 06 and 07) is too large for one. `open_pretrained` returns it on the meta device, where each
parameter knows its place in the files, and a process reads the slices that it holds. Saving collects one tensor at a time.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError, TensorFolder, plan_files, read_json, write_json, write_tensors
from shared.model.hf.format import FileTensor, Format, not_in_format
from shared.model.hf.files import TokenIds, every_id, read_token_ids, require_token_ids, write_generation
from shared.model.hf.registry import read_config, write_config
from shared.model.init import forget_files, materialize
from shared.model.transformer import PLAIN, TIED_TO, TransformerModel
from shared.tensor_files import ordered

LISTED = 12  # names in a refusal
HEAD = "lm_head.weight"  # in files
ROWS = 4096  # of a matrix that are compared at a time


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    builders: Builders = PLAIN,
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
    model = open_pretrained(folder, dtype=dtype, builders=builders)
    materialize(model, device, seed=0)
    forget_files(model)
    return model


def open_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    builders: Builders = PLAIN,
    files: TensorFolder | None = None,
    change: Callable[[TransformerModel], TransformerModel] | None = None,
) -> TransformerModel:
    """The same model on the meta device, whose parameters carry a function `stored` that reads a slice of theirs from the files
    (`shared.model.init`). `apply_parallel` cuts it, and then each process reads what it holds and no more.

    Args:
        files: what reads the folder's tensors, where some of them are kept in another form (chapter 10).
        change: gives the model another head before its tensors are looked for, where the files hold that one's (chapter 11).
    """
    folder = Path(folder)
    known, config, token_ids = read_folder(folder, () if files is None else files.settings)
    files = files or TensorFolder(folder)
    if known.tied_by_file:
        config = replace(config, tie_word_embeddings=not set(known.tied) & set(files.shapes))
    with torch.device("meta"):
        model = TransformerModel(config, builders).to(dtype)
        model = change(model) if change else model
    model.token_ids = token_ids
    known, _ = format_of(model, known, {})
    stored = known.tensors_of(model.config, files.shapes)
    if extra := not_in_format(stored.values(), whole_weights(model).like):
        raise PretrainedError(
            f"No tensor of the {known.model_type} format holds {listed(extra)}, so loading would leave it without values: load the plain "
            "model, then add what is not in its files."
        )
    in_files = names_in_files(known, stored, files, config)
    parameters = logical_parameters(model)
    require_fit(folder, stored, in_files, files, parameters)
    sources: dict[str, list[tuple[str, FileTensor]]] = {}
    for name, full in in_files.items():
        for ours in stored[full].ours:
            sources.setdefault(ours, []).append((name, stored[full]))
    for name, parameter in parameters.items():
        parameter.stored = partial(read_slice, files, sources[name], name, tuple(parameter.shape))
    require_equal_tied(folder, known, config, files, parameters)
    return model


def read_slice(
    files: TensorFolder,
    sources: list[tuple[str, FileTensor]],
    ours: str,
    shape: tuple[int, ...],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """A slice of one of our parameters, in the dtype of the files.

    Args:
        sources: the tensors that hold some of it, by their names in the files.
        ours, shape: the parameter's logical name, and the shape of the whole.
        offsets, sizes: where the slice begins and how long it is, in each dimension.
    """
    ranges = [(start, start + size) for start, size in zip(offsets, sizes, strict=True)]
    if sources[0][1].part is None:
        name, entry = sources[0]
        there, take = entry.locate(ranges, entry.ours.index(ours), shape)
        return take(files.read(name, there))
    (start, stop), *rest = ranges
    of_parts = {entry.part: name for name, entry in sources}
    return torch.stack([files.read(of_parts[part], rest) for part in range(start, stop)])


def logical_parameters(model: TransformerModel) -> dict[str, Tensor]:
    """Every parameter once, by the name that does not depend on tying."""
    return {model.logical_name(name): parameter for name, parameter in model.named_parameters()}


def format_of(model: TransformerModel, known: Format, raw: dict[str, Any]) -> tuple[Format, dict[str, Any]]:
    """The format and config.json of a model, derived from its family's."""
    return model.stored_as(known, raw) if model.stored_as else (known, raw)


def require_equal_tied(folder: Path, known: Format, config: ModelConfig, files: TensorFolder, parameters: dict[str, Tensor]) -> None:
    """Refuse a file whose head differs from the embedding that its configuration ties it to; some rows at a time are read."""
    for name in (name for name in known.tied if name in files.shapes and config.tie_word_embeddings):
        embedding = parameters[TIED_TO]
        rows, width = embedding.shape
        equal = files.shapes[name] == (rows, width) and all(
            torch.equal(
                files.read(name, [(start, min(start + ROWS, rows)), (0, width)]).to(embedding.dtype),
                embedding.stored((start, 0), (min(ROWS, rows - start), width)).to(embedding.dtype),
            )
            for start in range(0, rows, ROWS)
        )
        if not equal:
            raise PretrainedError(
                f"config.json in {folder} ties the head to the embedding, but {name} in the file is another matrix: set "
                "tie_word_embeddings to false to keep it, or remove the tensor."
            )


def read_folder(folder: Path, without: Collection[str] = ()) -> tuple[Format, ModelConfig, dict[str, Any]]:
    """The format and the configuration that a folder describes, and its special token ids. without: keys of its config.json that are not
    the model's."""
    if not folder.is_dir():
        raise PretrainedError(f"{folder} is no folder: give the one that holds a model's config.json.")
    raw = {key: value for key, value in read_json(folder / "config.json").items() if key not in without}
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
    wanted = {name: tuple(packed_like(entry, parameters).shape) for name, entry in stored.items()}
    misshapen = [
        f"{name} is {list(present[name])}, not {list(wanted[name])}" for name in wanted if present.get(name, wanted[name]) != wanted[name]
    ]
    problems = []
    for title, names in (("missing", set(wanted) - set(present)), ("extra", set(present) - set(wanted)), ("misshapen", misshapen)):
        if names:
            problems.append(f"{title}: {listed(names)}")
    if stored.keys() - present.keys() == {HEAD} and not any(name.startswith(("model.", "transformer.")) for name in files.shapes):
        raise PretrainedError(
            f"{folder} holds a bare model without a head, and its config.json does not tie one to the embedding: give the folder of the "
            "language model, or set tie_word_embeddings to true to take the embedding for its head."
        )
    if problems:
        raise PretrainedError(f"The tensors in {folder} do not match its config.json. {'; '.join(problems)}.")


def packed_like(entry: FileTensor, like: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a file on the meta device."""
    return entry.pack([torch.empty_like(view, device="meta") for view in entry.views(like)])


def listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


@dataclass(frozen=True)
class Weights:
    """The weights of a whole model, whatever processes hold them.

    like: logical name -> a tensor of the same shape and dtype, perhaps on the meta device; buffers included.
    collect: collect(name) -> the whole tensor on the CPU of the process that writes, None in the others. All processes call it with the
        same names in the same order.
    writes: whether this process writes.
    """

    like: Mapping[str, Tensor]
    collect: Callable[[str], Tensor | None]
    writes: bool = True


def whole_weights(model: TransformerModel) -> Weights:
    """Of a model that this process holds whole."""
    state = {model.logical_name(name): value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    return Weights(state, lambda name: state[name].cpu())


def save_pretrained(
    model: TransformerModel,
    folder: Path | str,
    *,
    model_type: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    token_ids: TokenIds | None = None,
    weights: Weights | None = None,
) -> None:
    """Write a whole model into a folder that transformers loads. A tied head is written once, as the embedding.

    Every file is put in place whole, `config.json` last; files of another model that were there are removed. One tensor of a file is made
    at a time.

    Args:
        model: with its embedding, all its blocks and its head; this process's part of it where `weights` are given.
        folder: made if it is not there.
        model_type: the format; None for the first that can hold the model. GPT-3's dense models are of type gpt2.
        max_shard_bytes: the weights are split into files of at most this size.
        token_ids: the tokenizer's `eos_token_id`, `bos_token_id`, `pad_token_id`, by these names, those that it has; None for the ones
            that the model was imported with. Without an end token, `generate` of transformers stops at its longest text only.
        weights: of a model that is spread over processes (`ParallelStrategy.weights`), each of which calls this; None for the model's own.

    Raises:
        ValueError: no format can describe the model, part of it is absent or sharded, it has parameters or buffers that the format
            does not name, or no row for one of the ids.
    """
    folder = Path(folder)
    known, raw = format_of(model, *write_config(model.config, model_type))
    require_token_ids(token_ids or {}, model.config)
    ids = every_id(model.token_ids if token_ids is None else token_ids, model.config)
    sharded = sorted(name for name, parameter in logical_parameters(model).items() if hasattr(parameter, "sharding"))
    if sharded and weights is None:
        raise ValueError(f"This process holds only a part of {listed(set(sharded))}, which is sharded: save a model with the full weights.")
    weights = weights or whole_weights(model)
    stored = {entry.name: entry for entry in known.tensors(model.config)}
    if absent := {name for entry in stored.values() for name in entry.ours} - set(weights.like):
        raise ValueError(f"Only a whole model can be saved in this format; this one lacks {listed(absent)}.")
    if extra := not_in_format(stored.values(), weights.like):
        raise ValueError(
            f"No tensor of the {known.model_type} format holds {listed(extra)}, and without it this would be another model: merge an "
            "adapter into the weights it belongs to, or take it out."
        )
    like = {name: packed_like(entry, weights.like) for name, entry in stored.items()}
    plan = plan_files({name: tensor.nbytes for name, tensor in like.items()}, max_shard_bytes)

    def make(name: str) -> Tensor | None:
        entry = stored[name]
        collected = {ours: weights.collect(ours) for ours in entry.ours}
        return entry.pack(entry.views(collected)) if weights.writes else None

    if not weights.writes:
        for names in plan.values():
            for name in ordered({name: like[name] for name in names}):
                make(name)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, plan, like, make)
    dtype = str(next(iter(like.values())).dtype).removeprefix("torch.")
    write_generation(folder, ids, model.config)
    write_json(folder / "config.json", raw | ids | {"dtype": dtype})
