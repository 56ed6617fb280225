"""Chapter 10. Writer of GGUF: a folder of Hugging Face's format as one file for llama.cpp and what is built on it.

    f32, f16, bf16       every matrix in that type
    q8_0, q4_0, q4_1     blocks of 32 numbers of a row in 8 or 4 bits; embedding and head in q8_0

Vectors and routers stay in float32, as llama.cpp wants them. A row that is no multiple of 32 stays in float16. What GGUF cannot describe,
or llama.cpp would compute otherwise, is refused before anything is written.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shared.course.errors import SettingError
from shared.finetune.chat.template import spelt
from shared.finetune.gguf.file import library
from shared.finetune.gguf.models import FACTORS, IMPLIED, KINDS, SCALING, SIZES, config_json, permuted, tensor_names
from shared.finetune.gguf.tokenizer import NAMES, TEMPLATE, tokenizer_metadata
from shared.finetune.quantization.frozen import FrozenFolder
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError, TensorFolder, read_json
from shared.model.hf.llama import ROPE_OPTIONS
from shared.model.hf.pretrained import read_folder
from shared.model.hf.registry import lost_fields, read_config
from shared.model.rope import llama3_frequencies
from shared.output_files import remove_left_over

BLOCK = 32  # numbers that share a scale
BOTH_ENDS = ("token_embd.weight", "output.weight")
MARKED = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@dataclass(frozen=True)
class Described:
    """A file before it is written: what `config_json` reads."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    factors: Tensor | None

    def read(self, name: str) -> Tensor:
        return self.factors


def save_gguf(folder: Path, path: Path, kind: str = "f16", tell: Callable[[str], None] = print) -> None:
    """Write the model, the tokenizer and the chat template of a folder as one GGUF file, put in place whole.

    Args:
        folder: of plain weights, as a run's `model`; an adapter is merged there.
        path: the file.
        kind: one of `packaged.TYPES`.
        tell: called with a line for what GGUF has no place for.

    Raises:
        PretrainedError, SettingError: what cannot be written, and why.
    """
    gguf = library()
    known, config, ids = read_folder(folder)
    config = config.resolved()
    files = TensorFolder(folder)
    config_of_file = described(path, known.model_type, config, files)
    where, shapes = tensor_names(known.model_type, config), config_of_file.shapes
    tokens = metadata_of_tokenizer(folder, config.vocab_size, ids, tell)
    types = {name: type_of(name, shape, kind) for name, shape in shapes.items()}
    if short := sorted({shape[-1] for name, shape in shapes.items() if kind[0] == "q" and types[name] == "f16"}):
        tell(f"Rows of {', '.join(map(str, short))} numbers are no multiple of {BLOCK}, so their matrices stay in float16.")
    remove_left_over(path.parent, path.name)  # it can be as large as the file: before its room is needed
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer = gguf.GGUFWriter(unfinished, config_of_file.architecture)
        writer.add_name(folder.resolve().parent.name if folder.name == "model" else folder.resolve().name)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
        writer.add_quantization_version(2)
        for key, value in (config_of_file.metadata | tokens).items():
            add(writer, key, value)
        for name, shape in shapes.items():
            number = gguf.GGMLQuantizationType[types[name].upper()]
            writer.add_tensor_info(name, list(shape), np.dtype(np.float32), size_in(shape, number), number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in shapes:
            writer.write_tensor_data(quantized(gathered(name, where, files, known.model_type, config, config_of_file.factors), types[name]))
        writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def described(path: Path, model_type: str, config: ModelConfig, files: TensorFolder) -> Described:
    """Metadata and shapes of the file.

    Raises:
        SettingError: a model that GGUF cannot describe.
    """
    if isinstance(files, FrozenFolder) or model_type not in KINDS:
        raise SettingError(f"A model of the kind {model_type} cannot be written as GGUF here: {', '.join(KINDS)} can.")
    arch, raw = KINDS[model_type], sizes(config)
    metadata = {f"{arch}.{key}": raw[name] for key, name in SIZES.items() if raw.get(name) is not None}
    head = config.head_dim
    metadata |= {f"{arch}.{key}": value for key, value in zip(IMPLIED[:3], (config.vocab_size, head, head), strict=True)}
    scaling, factors = config.rope_scaling, None
    if scaling and scaling.rope_type == "llama3":
        plain = 1 / config.rope_theta ** (torch.arange(0, head, 2).float() / head)
        factors = plain / llama3_frequencies(plain, scaling)
    elif scaling:
        said = {key: getattr(scaling, name) for key, name in SCALING.items() if name in ROPE_OPTIONS[scaling.rope_type]}
        metadata |= {f"{arch}.{key}": value for key, value in said.items() if value is not None}
        metadata[f"{arch}.rope.scaling.type"] = scaling.rope_type
    if config.experts is not None:
        metadata[f"{arch}.expert_count"] = config.experts.num_experts
    shapes: dict[str, tuple[int, ...]] = {FACTORS: tuple(factors.shape)} if factors is not None else {}
    for name, (theirs, expert) in tensor_names(model_type, config).items():
        shapes[theirs] = files.shapes[name] if expert is None else (config.experts.num_experts, *files.shapes[name])
    found = Described(path, arch, metadata, shapes, factors)
    if lost := lost_fields(config, read_config(config_json(found))[1]):
        fields = ", ".join(f"{name} {here!r} (it would be {there!r})" for name, (here, there) in lost.items())
        raise SettingError(f"GGUF cannot describe this {model_type} model. It would lose: {fields}.")
    return found


def sizes(config: ModelConfig) -> dict[str, Any]:
    """What SIZES names, of a model."""
    experts = config.experts
    own = {"rms_norm_eps": config.norm_eps}
    if experts is not None:
        own |= {"num_experts_per_tok": experts.num_experts_per_tok, "moe_intermediate_size": experts.moe_intermediate_size}
    return vars(config) | own


def type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor in a file of some kind."""
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "f32"
    if kind[0] != "q":
        return kind
    return "f16" if shape[-1] % BLOCK else "q8_0" if name in BOTH_ENDS else kind


def size_in(shape: tuple[int, ...], number: Any) -> int:
    return int(np.prod(library().quant_shape_to_byte_shape(shape, number)))


def gathered(
    name: str, where: dict[str, tuple[str, int | None]], files: TensorFolder, model_type: str, config: ModelConfig, factors: Tensor | None
) -> Tensor:
    """A tensor of the GGUF file, in float32: experts stacked."""
    if name == FACTORS:
        return factors
    parts = [(expert or 0, source) for source, (theirs, expert) in where.items() if theirs == name]
    read = [
        permuted(source, files.read(source, [(0, size) for size in files.shapes[source]]).float(), model_type, config, back=False)
        for _, source in sorted(parts)
    ]
    return read[0] if where[parts[0][1]][1] is None else torch.stack(read)


def quantized(tensor: Tensor, kind: str) -> np.ndarray:
    return library().quantize(tensor.contiguous().numpy(), library().GGMLQuantizationType[kind.upper()])


def metadata_of_tokenizer(folder: Path, rows: int, ids: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Metadata of the tokenizer, the ids of special tokens, and the chat template."""
    if not (folder / "tokenizer.json").is_file():
        raise PretrainedError(f"{folder} has no tokenizer.json, and a GGUF file holds its tokenizer: copy it there.")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    names = {theirs: spelt(config[ours]) for ours, theirs in NAMES.items() if config.get(ours)}
    numbers = {name: tokenizer.token_to_id(token) for name, token in names.items()}
    ends = ids.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    given = {"bos": ids.get("bos_token_id"), "padding": ids.get("pad_token_id"), "eos": ends[0] if ends else None}
    given["eot"] = ends[1] if len(ends) > 1 else None
    if len(ends) > 2:
        tell(f"GGUF holds two end tokens: the first two of {ends} are written.")
    numbers |= {name: number for name, number in given.items() if number is not None}
    said = tokenizer_metadata(tokenizer, rows) | {f"{name}_token_id": number for name, number in numbers.items() if number is not None}
    first = tokenizer.encode("a").ids
    said |= {"add_bos_token": first[0] == numbers.get("bos"), "add_space_prefix": False}
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    chat = {TEMPLATE: plain_template(text)} if isinstance(text, str) else {}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()} | chat


def plain_template(text: str) -> str:
    """A chat template without `{% generation %}`, which transformers alone knows; it renders the same text."""
    return MARKED.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text)


def add(writer: Any, key: str, value: Any) -> None:
    """A value of the metadata, in the type in which llama.cpp asks for it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
