"""Chapter 02. LLaMA's format, and those of its relatives Mistral, Qwen 2 and Qwen 3, which differ from it in a few keys."""

from dataclasses import replace

from shared.model.config import ModelConfig
from shared.model.hf.format import Format, Told, activation
from shared.model.hf.rope import read_rope, write_rope
from shared.model.hf.stored import Stored, same, weight_and_bias

SAME_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
COMMON_REQUIRED = {"pretraining_tp": (1, None), "quantization_config": (None,), "partial_rotary_factor": (1.0, None)}


def read_common(told: Told, longest: int, eps: float = 1e-6) -> ModelConfig:
    """What the relatives share. longest, eps: what holds where the file does not say."""
    longest = told.get("max_position_embeddings", longest)
    return ModelConfig(
        **{key: told[key] for key in SAME_KEYS},
        num_key_value_heads=told.get("num_key_value_heads"),
        head_dim=told.get("head_dim"),
        max_position_embeddings=longest,
        norm_eps=told.get("rms_norm_eps", eps),
        hidden_act=activation(told.get("hidden_act", "silu")),
        tie_word_embeddings=told.get("tie_word_embeddings", False),
        attention_dropout=told.get("attention_dropout", 0.0),
        initializer_range=told.get("initializer_range", 0.02),
        **read_rope(told, longest),
    )


def write_common(config: ModelConfig) -> Told:
    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    return {key: getattr(config, key) for key in SAME_KEYS} | {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": names.get(config.hidden_act, config.hidden_act),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.initializer_range,
        **write_rope(config),
    }


def read_llama(told: Told) -> ModelConfig:
    bias = told.get("attention_bias", False)
    changes = {"attention_bias": bias, "attention_output_bias": bias, "mlp_bias": told.get("mlp_bias", False)}
    return replace(read_common(told, 2048), **changes)


def write_llama(config: ModelConfig) -> Told:
    return write_common(config) | {"attention_bias": config.attention_output_bias, "mlp_bias": config.mlp_bias}


def read_mistral(told: Told) -> ModelConfig:
    return replace(read_common(told, 131072), sliding_window=told.get("sliding_window", 4096))


def write_mistral(config: ModelConfig) -> Told:
    return write_common(config) | {"sliding_window": config.sliding_window}


def read_windows(told: Told) -> dict:
    """Qwen's: a window in some blocks only. Where the file does not list them: in those from `max_window_layers` on."""
    window, layers = told.get("sliding_window"), told["num_hidden_layers"]
    if not told.get("use_sliding_window", False) or not window:
        return {}
    first = told.get("max_window_layers", 28)
    kinds = told.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return {"sliding_window": window, "layer_types": tuple(kinds)}


def write_windows(config: ModelConfig) -> Told:
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "max_window_layers": sum(kind == "full_attention" for kind in config.layer_types),
    }


def read_qwen2(told: Told) -> ModelConfig:
    return replace(read_common(told, 32768), attention_bias=True, **read_windows(told))


def write_qwen2(config: ModelConfig) -> Told:
    return write_common(config) | write_windows(config)


def read_qwen3(told: Told) -> ModelConfig:
    bias = told.get("attention_bias", False)
    changes = {"attention_bias": bias, "attention_output_bias": bias, "qk_norm": True, "head_dim": told.get("head_dim", 128)}
    return replace(read_common(told, 32768), **changes, **read_windows(told))


def write_qwen3(config: ModelConfig) -> Told:
    return write_common(config) | write_windows(config) | {"attention_bias": config.attention_bias}


def tensors(config: ModelConfig) -> list[Stored]:
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


def relative(model_type: str, architecture: str, read, write) -> Format:
    return Format(
        model_type, architecture, read, write, tensors, tied=("lm_head.weight",), required=COMMON_REQUIRED,
        ignored=(r".*\.rotary_emb\.inv_freq",),
    )  # fmt: skip


LLAMA = relative("llama", "LlamaForCausalLM", read_llama, write_llama)
QWEN2 = relative("qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2)
QWEN3 = relative("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3)
MISTRAL = relative("mistral", "MistralForCausalLM", read_mistral, write_mistral)
