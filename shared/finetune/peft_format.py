"""Chapter 10. Save and load adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`, LoRA, rsLoRA, DoRA, prompts.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, in]     also of a Conv1D, whose weight is [in, out]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, r]
    base_model.model.model.layers.0.mlp.experts.lora_A.weight          [E r, in]     of experts' down_proj; .base_layer of gate_up_proj

A file also says of which weights it is the adapter (`base_fingerprint`), in its header, where peft does not look.

Left out on purpose: files of adapters that were made for each expert by itself, with transformers 4.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.finetune.adapters import DEFAULT, Adapter, LayerUpdate, adapters_of, add_updates, attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_layers import ROOT, ExpertsPlace, Place, layers_in_files, packed, places_of, short_names, unpacked
from shared.finetune.soft_prompts import PREFIX, PROMPT, from_peft, to_peft
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError, read_json, write_json
from shared.model.hf.pretrained import Weights, whole_weights
from shared.model.transformer import TransformerModel
from shared.tensor_files import stream_tensors

CONFIG, TENSORS, FINGERPRINT = "adapter_config.json", "adapter_model.safetensors", "base_fingerprint"
KINDS = {"lora": "LORA", "prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"}
SOFT = "prompt_embeddings"
REFUSED = {  # settings that make another model of the same tensors, with the values that do not
    "bias": ("none",), "lora_bias": (False, None), "layer_replication": (None,), "modules_to_save": (None, []), "use_qalora": (False, None),
    "trainable_token_indices": (None,), "alora_invocation_tokens": (None,), "use_bdlora": (None, False),
    "kasa_config": (None,), "monteclora_config": (None,), "velora_config": (None,), "arrow_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"), "prefix_projection": (False, None),
}  # fmt: skip
READ = (
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "alpha_pattern", "use_rslora", "use_dora",
    "target_parameters", "num_virtual_tokens",
)  # fmt: skip
UNUSED = (  # what the tensors' names and shapes say as well; how values began; what belongs to one of REFUSED
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "fan_in_fan_out", "token_dim",
    "num_transformer_submodules", "num_attention_heads", "num_layers", "encoder_hidden_size", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs", "init_weights",
    "qalora_group_size", "megatron_config", "megatron_core", "runtime_config", "task_type", "auto_mapping", "peft_version", "revision",
    "inference_mode", "ensure_weight_tying",
)  # fmt: skip


def save_adapter(
    model: TransformerModel,
    folder: Path | str,
    name: str = DEFAULT,
    *,
    weights: Weights | None = None,
    base: str | None = None,
    fingerprint: str | None = None,
    model_type: str | None = None,
) -> None:
    """Write one adapter into a folder that peft loads.

    Args:
        model: with the adapter; this process's part of it where `weights` are given.
        folder: made if it is not there.
        weights: of a model that is spread over processes (`ParallelStrategy.weights`), each of which calls this; None for the model's own.
        base: the folder or the hub's name of the base model, for `base_model_name_or_path`.
        fingerprint: of the base's files (`shared.finetune.base.fingerprint`).
        model_type: the base's format; None for the first that can hold the model.
    """
    weights, adapter = weights or whole_weights(model), adapters_of(model)[name]
    config = adapter.config
    if config.kind == "lora":
        files = layers_in_peft(model, name, model_type)
        names, tensors, said = [place.name for place in files], {}, {}
        for place, modules in files.items():
            made, update = packed(place, modules, adapter, name, weights)
            tensors |= {f"{ROOT}{place.stem(names)}{ending}": tensor for ending, tensor in made.items()}
            said[place.name] = update
        raw = lora_config(config, said, any(place.is_transposed for place in files))
        if model.config.architecture == "decoder":  # whose layers of such names are all in its format, unlike an encoder's dense
            raw["target_modules"] = short_names(said, places_of(model.config, model_type))
        if wrapped := [place.name for place in files if isinstance(place, ExpertsPlace)]:
            raw |= {"target_parameters": wrapped, "target_modules": sorted(set(said) - set(wrapped)) or None}
    else:
        trained = {each: weights.collect(each) for each in weights.like if each.endswith((f".{PROMPT}.weight", f".{PREFIX}.weight"))}
        tensors = {SOFT: to_peft(trained, config.virtual_tokens)} if weights.writes else {}
        raw = soft_config(config, model.config)
    beside = {f"{ROOT}{theirs}": weights.collect(ours) for ours, theirs in model.trained_whole.items()}
    if not weights.writes:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | ({FINGERPRINT: fingerprint} if fingerprint else {})
    found = tensors | beside
    stream_tensors(folder / TENSORS, found, lambda key: found[key].detach().cpu(), metadata)  # the library would shuffle metadata
    if beside:
        raw["modules_to_save"] = modules_to_save(model)
    task = "SEQ_CLS" if model.trained_whole else "CAUSAL_LM" if model.config.architecture == "decoder" else None
    write_json(folder / CONFIG, raw | {"peft_type": KINDS[config.kind], "task_type": task, "base_model_name_or_path": base})


def modules_to_save(model: TransformerModel) -> list[str]:
    """Peft's names of the modules that are trained whole: a reward model's head."""
    return [theirs.rpartition(".")[0] for theirs in model.trained_whole.values()]


def layers_in_peft(model: TransformerModel, name: str = DEFAULT, model_type: str | None = None) -> dict[Place, list[str]]:
    """The layers of peft's that an adapter's updates are saved in, and which of ours each of them holds."""
    adapter = adapters_of(model)[name]
    files = layers_in_files(model.config, list(adapter.layers), model_type)
    for place, modules in files.items():
        if adapter.config.decomposed and len(modules) < len(place.ours):
            raise ValueError(f"peft's layer {place.name} holds {', '.join(place.ours)}, and DoRA scales all its rows: target all or none.")
        if adapter.config.dropout and isinstance(place, ExpertsPlace):
            raise ValueError(f"adapter.dropout is {adapter.config.dropout}, and peft has none over experts: give 0, or do not target them.")
    return files


def lora_config(config: AdapterConfig, layers: Mapping[str, LayerUpdate], is_transposed: bool) -> dict[str, Any]:
    """The adapter_config.json of a LoRA."""
    alphas = {name: each.scaling * (math.sqrt(each.rank) if config.rank_stabilized else each.rank) for name, each in layers.items()}
    escaped = {name: re.escape(name) for name in layers}
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(layers),
        "rank_pattern": {escaped[name]: each.rank for name, each in layers.items() if each.rank != config.rank},
        "alpha_pattern": {escaped[name]: alpha for name, alpha in alphas.items() if not math.isclose(alpha, config.alpha)},
        "bias": "none",
        "use_rslora": config.rank_stabilized,
        "use_dora": config.decomposed,
        "fan_in_fan_out": is_transposed,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def soft_config(config: AdapterConfig, model: ModelConfig) -> dict[str, Any]:
    """The adapter_config.json of virtual tokens."""
    is_prefix = config.kind == "prefix"
    raw = {
        "num_virtual_tokens": config.virtual_tokens,
        "token_dim": model.num_key_value_heads * model.head_dim if is_prefix else model.hidden_size,
        "num_transformer_submodules": 1,
        "num_attention_heads": model.num_key_value_heads if is_prefix else model.num_attention_heads,
        "num_layers": model.num_hidden_layers,
        "inference_mode": True,
    }
    kinds = {"encoder_hidden_size": model.hidden_size, "prefix_projection": False}, {"prompt_tuning_init": "RANDOM"}
    return raw | (kinds[0] if is_prefix else kinds[1])


def load_adapter(
    model: TransformerModel, folder: Path | str, name: str = DEFAULT, *, base: str | None = None, fingerprint: str | None = None
) -> TransformerModel:
    """Attach an adapter from a folder that peft or `save_adapter` has written, in place, before `apply_parallel`.

    Args:
        model: the base, whole and plain; it may be on the meta device, and may have other adapters.
        base, fingerprint: of the base, as for `save_adapter`; None to compare nothing.
    """
    folder = Path(folder)
    raw, (tensors, metadata) = read_json(folder / CONFIG), read_tensors(folder)
    require_base(folder, raw, metadata, base, fingerprint)
    beside = {ours: tensors.pop(f"{ROOT}{theirs}", None) for ours, theirs in model.trained_whole.items()}
    if beside and None not in beside.values():
        raw.pop("modules_to_save", None)  # peft's list names every module that might be one
    elif beside and not raw.get("modules_to_save"):
        warnings.warn(f"The adapter in {folder} has no {', '.join(modules_to_save(model))}: the model's own stays.", stacklevel=2)
    for key, allowed in REFUSED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise PretrainedError(f"{folder / CONFIG} has {key} {raw[key]!r}, which is not built here: merge it in peft.")
    if strange := sorted(key for key, value in raw.items() if value and key not in {*READ, *REFUSED, *UNUSED}):
        what = f"{folder / CONFIG} has {', '.join(strange)}, which is not known here, and the adapter is read without."
        warnings.warn(what, stacklevel=2)
    kind = next((ours for ours, theirs in KINDS.items() if theirs == raw.get("peft_type")), None)
    if kind is None:
        raise PretrainedError(f"{folder / CONFIG} has peft_type {raw.get('peft_type')!r}: {', '.join(KINDS.values())} are built here.")
    try:
        if kind != "lora":
            return load_soft(model, folder, AdapterConfig(kind, virtual_tokens=raw["num_virtual_tokens"]), tensors, name)
        settings = {"rank": raw["r"], "alpha": float(raw["lora_alpha"]), "dropout": raw.get("lora_dropout", 0.0)}
        config = AdapterConfig(
            **settings, rank_stabilized=bool(raw.get("use_rslora")), decomposed=bool(raw.get("use_dora")), targets=("from a file",)
        )
    except (KeyError, TypeError) as error:
        raise PretrainedError(f"{folder / CONFIG} does not say what an adapter needs ({error}): copy it again.") from None
    values, layers = unpacked(model, folder, config, raw.get("alpha_pattern") or {}, raw.get("target_parameters") or [], tensors)
    add_updates(model, Adapter(replace(config, targets=tuple(layers)), layers), name)
    set_values(model, {f"{module}.adapters.{name}.{what}": value for (module, what), value in values.items()})
    set_values(model, {ours: value for ours, value in beside.items() if value is not None})
    for ours in beside:
        model.get_parameter(ours).requires_grad_()
    return model


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of an adapter, and the metadata of their file."""
    path = folder / TENSORS
    if not path.exists():
        pickled = " Its pickled weights could run code: save it with a newer peft." if (folder / "adapter_model.bin").exists() else ""
        raise PretrainedError(f"{folder} has no {TENSORS}: give the folder of an adapter.{pickled}")
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise PretrainedError(f"{path} is no complete safetensors file ({error}): copy it again.") from None


def require_base(folder: Path, raw: dict[str, Any], metadata: dict[str, str], base: str | None, fingerprint: str | None) -> None:
    """Reject an adapter of other weights: by fingerprint if both sides have one, else by the base's name."""
    theirs, named = metadata.get(FINGERPRINT), raw.get("base_model_name_or_path")
    known = theirs is not None and fingerprint is not None
    if known and theirs != fingerprint:
        raise PretrainedError(f"The adapter in {folder} was trained for other weights ({named}): load it onto its own base.")
    if not known and base and named and Path(named).name != Path(base).name:
        raise PretrainedError(
            f"The adapter in {folder} was trained for {named}, and the base is {base}: load it onto its own, or, where the weights are "
            f"the same, put that name into base_model_name_or_path of {CONFIG}."
        )


def load_soft(
    model: TransformerModel, folder: Path, config: AdapterConfig, tensors: dict[str, Tensor], name: str
) -> TransformerModel:
    """Attach virtual tokens with the values of peft's one tensor."""
    if SOFT not in tensors:
        raise PretrainedError(f"{folder / TENSORS} holds no {SOFT}: copy it again.")
    attach_adapter(model, config, name)
    shapes = {each: parameter.shape for each, parameter in model.named_parameters() if parameter.requires_grad}
    set_values(model, from_peft(tensors[SOFT], shapes))
    return model


def set_values(model: TransformerModel, values: Mapping[str, Tensor]) -> None:
    """Set the values of parameters, or on the meta device functions that read the slices of a process."""
    for name, value in values.items():
        parameter = model.get_parameter(name)
        if parameter.is_meta:
            parameter.stored = partial(slice_of, value)
        else:
            parameter.data.copy_(value)


def slice_of(value: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return value[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
