"""Stages 1 and 2 of build 02: what a configuration says, and the tensors of a folder."""

import functools
import json
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shared.course.checking import Case

from .pieces import (
    BIASED,
    EXACT,
    GROUPED,
    LINEAR,
    LLAMA3,
    PLAIN,
    TEXT,
    TIED,
    WIDE,
    Config,
    Results,
    copy_of,
    folder_of,
    said,
    their_config,
    without,
)

# Stage 1: config

INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
NUMBERS = ("rms_norm_eps", "initializer_range", "rope_theta")
BOOLEANS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
OPTIONS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def settings_case(title: str, config: Config, rung: str = "oracle") -> Case:
    """transformers' LlamaConfig, which knows both ways to write RoPE."""

    def expected(**_: Any) -> Results:
        theirs = their_config(config)
        rope = dict(theirs.rope_parameters)
        kind, theta = rope["rope_type"], rope["rope_theta"]
        scaling = {"no scaling": True} if kind == "default" else {"rope_type": kind} | {key: float(rope[key]) for key in OPTIONS[kind]}
        found = {key: getattr(theirs, key) for key in INTEGERS + BOOLEANS}
        found |= {"rms_norm_eps": theirs.rms_norm_eps, "initializer_range": theirs.initializer_range, "rope_theta": float(theta)}
        return {"settings": found, "rope_scaling": scaling, "config": "as it was"}

    def observe(adapters: Any, **_: Any) -> Results:
        given = json.loads(json.dumps(config))
        found = dict(adapters.settings(given))
        scaling = found.pop("rope_scaling", "missing")
        if isinstance(scaling, dict):
            scaling = {key: float(value) if isinstance(value, int | float) else value for key, value in scaling.items()}
        found |= {key: float(found[key]) for key in NUMBERS if isinstance(found.get(key), int | float)}
        shown = {"no scaling": True} if scaling is None else scaling
        return {"settings": found, "rope_scaling": shown, "config": "as it was" if given == config else "changed"}

    return Case(rung, title, lambda: {"config": config}, expected, "transformers' LlamaConfig", observe, rtol=1e-12)


SILENT = {key: PLAIN[key] for key in ("model_type", *INTEGERS[:5])}
OLD = without(GROUPED, "rope_parameters", "initializer_range") | {"rope_theta": 500000}
CONFIG = (
    settings_case("all is said", GROUPED),
    settings_case("heads of another size", WIDE),
    settings_case("biases, tied", BIASED | {"tie_word_embeddings": True}),
    settings_case("other numbers", PLAIN | {"rms_norm_eps": 1e-5, "initializer_range": 0.1}),
    settings_case("only what must be there", SILENT),
    settings_case("keys that are null", GROUPED | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}),
    settings_case("transformers 5: a theta", PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    settings_case("transformers 5: linear", PLAIN | {"rope_parameters": LINEAR}),
    settings_case("transformers 5: llama3", PLAIN | {"rope_parameters": LLAMA3}),
    settings_case("transformers 4: a theta", OLD),
    settings_case("transformers 4: a theta, and a scaling that is null", OLD | {"rope_scaling": None}),
    settings_case("transformers 4: llama3", OLD | {"rope_scaling": without(LLAMA3, "rope_theta")}),
    settings_case("transformers 4, earlier: type", OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    settings_case("transformers 4: no theta", without(OLD, "rope_theta") | {"rope_scaling": {"type": "linear", "factor": 2}}),
)

# Stage 2: tensors


def tensors_case(title: str, folder: Any, rung: str = "oracle") -> Case:
    """folder: makes it. safetensors' own load_file, of each file that counts."""

    def expected(**_: Any) -> Results:
        where = folder()
        index = where / "model.safetensors.index.json"
        if not index.exists():
            return load_file(where / "model.safetensors")
        places = json.loads(index.read_text())["weight_map"]
        files = {file: load_file(where / file) for file in set(places.values())}
        return {name: files[file][name] for name, file in places.items()}

    observe = lambda adapters, **_: {name: tensor.clone() for name, tensor in adapters.tensors(folder()).items()}  # noqa: E731
    given = lambda: {"files": sorted(file.name for file in folder().iterdir())[:6]}  # noqa: E731
    return Case(rung, title, given, expected, "safetensors' load_file", observe, **EXACT)


@functools.cache
def other_files() -> Any:
    """The original weights beside the shards, as in Meta's folders, and a shard that the index does not name."""
    where = copy_of(folder_of(PLAIN, shards="9KB"))
    save_file({"tok_embeddings.weight": torch.ones(3)}, where / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.zeros(24), "more": torch.ones(2)}, where / "model-00009-of-00009.safetensors")
    return where


@functools.cache
def twice() -> Any:
    """Every shard also has a tensor that the index assigns to another one, and one that it assigns to none."""
    where = copy_of(folder_of(PLAIN, shards="9KB"))
    places = json.loads((where / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(places.values()):
        found = {name: tensor.clone() for name, tensor in load_file(where / file).items()}
        found |= {name: torch.full((2,), 9.0) for name in ("model.norm.weight", "left over") if name not in found}
        save_file(found, where / file)
    return where


@functools.cache
def beside() -> Any:
    where = copy_of(folder_of(TIED))
    for name in ("adapter_model", "original"):
        save_file({"model.norm.weight": torch.zeros(24), "more": torch.ones(2)}, where / f"{name}.safetensors")
    (where / "pytorch_model.bin").write_bytes(b"not to be opened")
    return where


TENSORS = (
    tensors_case("one file", lambda: folder_of(PLAIN)),
    tensors_case("many files and an index", lambda: folder_of(PLAIN, shards="9KB")),
    tensors_case("two files", lambda: folder_of(GROUPED, shards="30KB")),
    tensors_case("bfloat16", lambda: folder_of(PLAIN, dtype=torch.bfloat16)),
    tensors_case("float16 in many files", lambda: folder_of(GROUPED, shards="5KB", dtype=torch.float16)),
    tensors_case("another file beside the one", beside),
    tensors_case("files that the index does not name", other_files),
    tensors_case("tensors that the index takes from another file, or from none", twice),
)


def stays_case() -> Case:
    """Tensors that have been read are not changed when the file is replaced by one of the same size."""

    def observe(adapters: Any, **_: Any) -> Results:
        where = copy_of(folder_of(PLAIN))
        found = adapters.tensors(where)["model.norm.weight"]
        found += 1  # a tensor that can be written to
        again = adapters.tensors(where)["model.norm.weight"]
        return {"read again": again.clone()}

    expected = lambda **_: {"read again": load_file(folder_of(PLAIN) / "model.safetensors")["model.norm.weight"]}  # noqa: E731
    given = {"what": "a tensor that was read is changed, and the folder read again", "configuration": said(PLAIN)}
    return Case("property", "the folder stays as it is", lambda: given, expected, TEXT.format(2), observe, **EXACT)


TENSORS = (*TENSORS, stays_case())
