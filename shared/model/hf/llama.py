"""Chapter 02. LLaMA's format, and those of its relatives Mistral, Qwen 2 and Qwen 3, which differ from it in a few keys.

transformers 4 and 5 write RoPE differently. Version 5: `rope_parameters`, with `rope_type` ("default" for none) and `rope_theta` inside.
Version 4: `rope_theta` beside `rope_scaling`, whose kind is called `rope_type` or, earlier still, `type`.
"""

from dataclasses import replace
from typing import Any

from shared.model.config import ModelConfig, RopeScaling
from shared.model.hf.format import ConfigJson, FileTensor, Format, Key, as_named, read_keys, require_number, same, weight_and_bias
from shared.model.hf.format import write_keys

KEYS = as_named("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size") | {
    "num_key_value_heads": Key("num_key_value_heads", None),
    "head_dim": Key("head_dim", None),
    "max_position_embeddings": Key("max_position_embeddings"),
    "norm_eps": Key("rms_norm_eps"),
    "hidden_act": Key("hidden_act", "silu"),
    "tie_word_embeddings": Key("tie_word_embeddings", False),
    "attention_dropout": Key("attention_dropout", 0.0),
    "initializer_range": Key("initializer_range", 0.02),
}
COMMON_REQUIRED = {"pretraining_tp": (1, None), "quantization_config": (None,), "partial_rotary_factor": (1.0, None),
                   "text_config": (None,)}  # fmt: skip
ROPE_OPTIONS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ORIGINAL = "original_max_position_embeddings"
HARMLESS_ROPE_KEYS = {"rope_type", "type", "rope_theta", ORIGINAL}
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rope(raw: ConfigJson, longest: int, theta: float = 10000.0) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for a `ModelConfig`, as transformers 5 reads them: `rope_scaling` replaces `rope_parameters`.

    Args:
        longest: max_position_embeddings.
        theta: of the class, where the file says none.

    Raises:
        ValueError: a kind or an option that is not understood, or two places that do not say the same.
    """
    newer, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for name, given in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(given, dict):
            raise ValueError(f"{name} is {given!r}: give an object, such as {{\"rope_type\": \"default\", \"rope_theta\": 10000.0}}.")
    said = older or newer
    if any(isinstance(value, dict) for value in said.values()):
        raise ValueError("rope_parameters for each kind of layer are not understood here: one RoPE holds for all layers.")
    if older and newer and "rope_theta" in newer and not older.get("rope_theta") and not raw.get("rope_theta"):
        raise ValueError(
            f"rope_scaling stands beside rope_parameters, which it replaces, and its rope_theta {newer['rope_theta']:g} with it: "
            f"transformers would take {theta:g}. Put the scaling's keys into rope_parameters, or give rope_theta beside rope_scaling."
        )
    theta = said.get("rope_theta") or raw.get("rope_theta") or theta
    require_number(float, "rope_theta", theta)
    theta = float(theta)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ROPE_OPTIONS:
        raise ValueError(f"rope_type {kind!r} is not one of this model's: default, {', '.join(ROPE_OPTIONS)}.")
    given = {key: value for key, value in said.items() if value is not None and (key, value) != ("truncate", True)}
    if strange := sorted(set(given) - set(ROPE_OPTIONS[kind]) - HARMLESS_ROPE_KEYS):
        raise ValueError(f"{kind} RoPE scaling with {', '.join(strange)} is not understood here.")
    options = {key: given[key] for key in ROPE_OPTIONS[kind] if key in given}
    if kind in ("yarn", "llama3"):
        options["original_max_position_embeddings"] = raw.get(ORIGINAL) or options.get(ORIGINAL) or longest
    if kind == "yarn" and "factor" in said:  # null
        options.setdefault("factor", longest / options[ORIGINAL])
    if "factor" not in options:
        raise ValueError(f"{kind} RoPE scaling has no factor, which says how many times longer the context becomes.")
    return {"rope_theta": theta, "rope_scaling": RopeScaling(kind, **options)}


def write_rope(config: ModelConfig) -> ConfigJson:
    """`rope_parameters` for transformers 5; and for readers of version 4, vLLM's among them, `rope_theta` and `rope_scaling` beside it."""
    scaling, theta = config.rope_scaling, {"rope_theta": config.rope_theta}
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default"} | theta} | theta
    options = {key: getattr(scaling, key) for key in ROPE_OPTIONS[scaling.rope_type] if getattr(scaling, key) is not None}
    said = {"rope_type": scaling.rope_type} | options
    return {"rope_parameters": said | theta, "rope_scaling": said} | theta


def read_common(raw: ConfigJson, longest: int, eps: float = 1e-6, theta: float = 10000.0) -> ModelConfig:
    """What the relatives share. longest, eps, theta: what holds where the file does not say."""
    raw = {"max_position_embeddings": longest, "rms_norm_eps": eps} | raw
    return ModelConfig(**read_keys(KEYS, raw), **read_rope(raw, raw["max_position_embeddings"], theta))


def write_common(config: ModelConfig) -> ConfigJson:
    return write_keys(KEYS, config, tanh="gelu_pytorch_tanh") | write_rope(config)


def read_windows(raw: ConfigJson, window: int | None, first: int = 0, *, listed: bool = True) -> dict[str, Any]:
    """Sliding windows by block: as `layer_types` lists them; without this list, from block `first` on.

    Args:
        window: that the file gives and does not switch off.
        listed: whether the model's class in transformers reads the list; another one must say what that class computes.

    Raises:
        ValueError: a list that does not fit.
    """
    layers, said = raw["num_hidden_layers"], raw.get("layer_types")
    kinds = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    if said is not None:
        if not isinstance(said, list) or len(said) != layers:
            raise ValueError(f"layer_types is {said}, and num_hidden_layers {layers}: it must list a kind of attention for each block.")
        if not set(said) <= ({FULL} if window is None else {FULL, SLIDING}) or not (listed or said == kinds):
            found, wanted = (", ".join(sorted(map(str, set(each)))) for each in (said, kinds))
            use = "no sliding window" if window is None else f"a sliding window of {window}"
            raise ValueError(
                f"layer_types lists {found}, and with {use} in use a {raw.get('model_type')} model computes {wanted}: make sliding_window, "
                "use_sliding_window and layer_types say the same."
            )
        kinds = said
    return {"sliding_window": window, "layer_types": tuple(kinds)} if SLIDING in kinds else {}


def read_llama(raw: ConfigJson) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    changes = {"attention_bias": bias, "attention_output_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}
    return replace(read_common(raw, 2048), **changes, **read_windows(raw, None, listed=False))


def write_llama(config: ModelConfig) -> ConfigJson:
    return write_common(config) | {"attention_bias": config.attention_output_bias, "mlp_bias": config.mlp_bias}


def read_mistral(raw: ConfigJson) -> ModelConfig:
    """With `layer_types` it is a Ministral, which transformers' AutoModel makes of it."""
    return replace(read_common(raw, 131072), **read_windows(raw, raw.get("sliding_window", 4096)))


def write_window(config: ModelConfig) -> ConfigJson:
    """One window for all blocks."""
    return write_common(config) | {"sliding_window": config.sliding_window}


def write_mistral(config: ModelConfig) -> ConfigJson:
    return write_window(config) | ({"layer_types": list(config.layer_types)} if len(set(config.layer_types)) > 1 else {})


def qwen_window(raw: ConfigJson) -> int | None:
    return raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None


def read_qwen_windows(raw: ConfigJson) -> dict[str, Any]:
    return read_windows(raw, qwen_window(raw), raw.get("max_window_layers", 28))


def write_windows(config: ModelConfig) -> ConfigJson:
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "max_window_layers": sum(kind == "full_attention" for kind in config.layer_types),
    }


def read_qwen2(raw: ConfigJson) -> ModelConfig:
    return replace(read_common(raw, 32768), attention_bias=True, **read_qwen_windows(raw))


def write_qwen2(config: ModelConfig) -> ConfigJson:
    return write_common(config) | write_windows(config)


def read_qwen3(raw: ConfigJson) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    changes = {"attention_bias": bias, "attention_output_bias": bias, "qk_norm": True, "head_dim": raw.get("head_dim", 128)}
    return replace(read_common(raw, 32768), **changes, **read_qwen_windows(raw))


def write_qwen3(config: ModelConfig) -> ConfigJson:
    return write_common(config) | write_windows(config) | {"attention_bias": config.attention_bias}


def tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [same("model.embed_tokens.weight", "embedding.tokens.weight"), same("model.norm.weight", "stack.final_norm.weight")]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"stack.blocks.{layer}"
        stored.append(same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight"))
        stored.append(same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward_norm.weight"))
        for name, bias in (("q_proj", config.attention_bias), ("k_proj", config.attention_bias), ("v_proj", config.attention_bias),
                           ("o_proj", config.attention_output_bias)):  # fmt: skip
            stored += weight_and_bias(same, f"{theirs}.self_attn.{name}", f"{ours}.attention.{name}", bias)
        for name in ("gate_proj", "up_proj", "down_proj"):
            stored += weight_and_bias(same, f"{theirs}.mlp.{name}", f"{ours}.feed_forward.{name}", config.mlp_bias)
        if config.qk_norm:
            stored += [same(f"{theirs}.self_attn.{name}.weight", f"{ours}.attention.{name}.weight") for name in ("q_norm", "k_norm")]
    return stored


def relative(model_type: str, architecture: str, read, write, **token_ids: int) -> Format:
    return Format(
        model_type, architecture, read, write, tensors, tied=("lm_head.weight",), required=COMMON_REQUIRED,
        ignored=(r".*\.rotary_emb\.inv_freq",), prefix="model.", token_ids=token_ids,
    )  # fmt: skip


LLAMA = relative("llama", "LlamaForCausalLM", read_llama, write_llama, bos_token_id=1, eos_token_id=2)
QWEN2 = relative("qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2)
QWEN3 = relative("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3)
MISTRAL = relative("mistral", "MistralForCausalLM", read_mistral, write_mistral, bos_token_id=1, eos_token_id=2)
