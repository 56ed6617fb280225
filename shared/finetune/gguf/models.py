"""Chapter 10. Models in GGUF and in Hugging Face's format: keys of the configuration and names of tensors, in both directions.

    general.architecture    model_type
    llama                   llama, mistral; mixtral where there are experts
    qwen2, qwen3            the same
    qwen3moe                qwen3_moe

Of `llama`, files keep the rows of the query and key projections in another order: llama.cpp rotates neighbouring pairs of a head's
dimensions, and transformers pairs dimension i with i + head_dim / 2.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import shared.moe.hf  # noqa: F401 (adds the mixtures to FORMATS)
from shared.finetune.gguf.file import GgufFile, library
from shared.model.config import ModelConfig, RopeScaling
from shared.model.hf.files import PretrainedError
from shared.model.hf.registry import FORMATS, read_config
from shared.model.rope import llama3_frequencies

KINDS = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
READ = {architecture: model_type for model_type, architecture in reversed(KINDS.items())}  # the first of each
EXPERT = re.compile(r"\.experts\.(\d+)\.")
PERMUTED = re.compile(r"self_attn\.([qk])_proj\.")
FACTORS = "rope_freqs.weight"  # what the frequencies of Llama 3.1 are divided by
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of every such model

SIZES = {  # of GGUF, after the architecture's name -> of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
IMPLIED = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.finetuned", "expert_count")


def read_gguf_config(file: GgufFile) -> tuple[ModelConfig, dict[str, Any]]:
    """The model that a file's metadata describe, and its config.json.

    Raises:
        PretrainedError: an architecture or a setting that is not understood here.
    """
    if file.architecture not in READ:
        raise PretrainedError(f"{file.path} holds a model of the kind {file.architecture}, and these are read here: {', '.join(READ)}.")
    try:
        raw = config_json(file)
        return read_config(raw)[1], raw
    except (ValueError, TypeError) as error:
        raise PretrainedError(f"{file.path}: {error}") from None


def config_json(file: GgufFile) -> dict[str, Any]:
    prefix = f"{file.architecture}."
    said = {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}
    if strange := sorted(set(said) - set(SIZES) - set(SCALING) - set(IMPLIED)):
        raise ValueError(f"{strange[0]} is {said[strange[0]]!r}, which is not understood here.")
    raw = {name: said[key] for key, name in SIZES.items() if key in said}
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    if lacking := [key for key in list(SIZES)[:5] if not isinstance(said.get(key), int)]:
        raise ValueError(f"{file.architecture}.{lacking[0]} is {said.get(lacking[0])!r}, and a model needs one number there.")
    head = raw.setdefault("head_dim", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if said.get(key, head) != head:
            raise ValueError(f"{key} is {said[key]} beside heads of {head}: only equal ones are built here.")
    experts = said.get("expert_count", 0)
    model_type = "mixtral" if file.architecture == "llama" and experts else READ[file.architecture]
    if experts:
        raw |= {"num_local_experts": experts, "norm_topk_prob": True}  # as llama.cpp normalizes
    raw["vocab_size"] = file.shapes.get("token_embd.weight", (0,))[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.shapes
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.shapes
    raw["mlp_bias"] = "blk.0.ffn_gate.bias" in file.shapes
    raw |= rope(file, said, raw.pop("rope_theta", 10000.0), head)
    return {"model_type": model_type, "architectures": [FORMATS[model_type].architecture]} | raw


def rope(file: GgufFile, said: dict[str, Any], theta: float, head: int) -> dict[str, Any]:
    """The keys of RoPE: linear and YaRN scaling are metadata, and Llama 3.1's a tensor with a divisor for each frequency."""
    kind, scaling = said.get("rope.scaling.type", "none"), {name: said[key] for key, name in SCALING.items() if key in said}
    if FACTORS in file.shapes:
        factors = file.read(FACTORS)
        found = RopeScaling("llama3", factor=float(factors.max()), **LLAMA3)
        plain = 1 / theta ** (torch.arange(0, head, 2).float() / head)
        if not (plain / llama3_frequencies(plain, found)).allclose(factors, rtol=1e-4):
            raise ValueError(f"{FACTORS} are no divisors of Llama 3.1's kind, and others are not understood here.")
        kind, scaling = "llama3", {"factor": found.factor} | LLAMA3
    if kind in ("none", ""):
        return {"rope_theta": theta}
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope.scaling.type is {kind!r}, which GGUF does not have or which is not understood here: linear and yarn are.")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind} | scaling}


def tensor_names(model_type: str, config: ModelConfig) -> dict[str, tuple[str, int | None]]:
    """Tensor in Hugging Face's files -> tensor in GGUF, and the expert whose part of it it is."""
    gguf = library()
    arch = next(arch for arch in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[arch] == KINDS[model_type])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for entry in FORMATS[model_type].tensors(config):
        expert = EXPERT.search(entry.name)
        theirs = names.get_name(EXPERT.sub(".experts.", entry.name), try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise PretrainedError(f"GGUF has no place for {entry.name} in a model of the kind {KINDS[model_type]}.")
        found[entry.name] = theirs, int(expert[1]) if expert else None
    return found


def permuted(name: str, tensor: Tensor, model_type: str, config: ModelConfig, back: bool) -> Tensor:
    """A query or key projection's rows in the other format's order; any other tensor as it is.

    Args:
        name: in Hugging Face's files.
        tensor: [heads * head_dim, ...].
        back: from GGUF's order to transformers', or the other way.
    """
    projection = PERMUTED.search(name)
    if KINDS[model_type] != "llama" or projection is None:
        return tensor
    heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
    pairs = (tensor.shape[0] // heads // 2, 2) if back else (2, tensor.shape[0] // heads // 2)
    return tensor.view(heads, *pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def require_same(file: GgufFile, wanted: Iterable[str]) -> None:
    """Refuse a file that lacks a tensor of its model, or has another."""
    wanted = {*wanted}
    missing, extra = sorted(wanted - file.shapes.keys()), sorted(file.shapes.keys() - wanted - {FACTORS})
    if missing or extra:
        said = [f"{what}: {', '.join(names[:4])}" for what, names in (("missing", missing), ("extra", extra)) if names]
        raise PretrainedError(f"The tensors in {file.path} do not match its model. {'; '.join(said)}.")
