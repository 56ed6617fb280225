"""Chapter 02. BLOOM's format: ALiBi, normalised embeddings, and queries, keys and values fused head by head."""

from shared.model.config import ModelConfig
from shared.model.hf.format import ConfigJson, FileTensor, Format, interleaved_heads, same, weight_and_bias


def read(raw: ConfigJson) -> ModelConfig:
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw.get("hidden_size") or raw["n_embed"],
        num_hidden_layers=raw["n_layer"],
        num_attention_heads=raw.get("n_head") or raw["num_attention_heads"],
        max_position_embeddings=raw.get("seq_length", 2048),
        position="alibi",
        norm="layer_norm",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        embedding_norm=True,
        hidden_act="gelu_tanh",
        gated=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        hidden_dropout=raw.get("hidden_dropout", 0.0),
        attention_dropout=raw.get("attention_dropout", 0.0),
        initializer_range=raw.get("initializer_range", 0.02),
    )


def write(config: ModelConfig) -> ConfigJson:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "seq_length": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.initializer_range,
    }


def tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [
        same("transformer.word_embeddings.weight", "embedding.tokens.weight"),
        *weight_and_bias(same, "transformer.word_embeddings_layernorm", "embedding.norm", True),
        *weight_and_bias(same, "transformer.ln_f", "stack.final_norm", True),
    ]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"transformer.h.{layer}", f"stack.blocks.{layer}"
        for kind in ("weight", "bias"):
            parts = tuple(f"{ours}.attention.{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj"))
            stored.append(interleaved_heads(f"{theirs}.self_attention.query_key_value.{kind}", parts, config.num_attention_heads))
        for their_name, our_name in (
            ("input_layernorm", "attention_norm"), ("self_attention.dense", "attention.o_proj"),
            ("post_attention_layernorm", "feed_forward_norm"), ("mlp.dense_h_to_4h", "feed_forward.up_proj"),
            ("mlp.dense_4h_to_h", "feed_forward.down_proj"),
        ):  # fmt: skip
            stored += weight_and_bias(same, f"{theirs}.{their_name}", f"{ours}.{our_name}", True)
    return stored


BLOOM = Format(
    "bloom", "BloomForCausalLM", read, write, tensors,
    tied=("lm_head.weight",),
    required={"apply_residual_connection_post_layernorm": (False,), "quantization_config": (None,)},
    prefix="transformer.",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip
