"""Chapter 02. GPT-2's format, which GPT-3's published sizes use too: [in, out] matrices, queries, keys and values in one."""

from shared.model.config import ModelConfig
from shared.model.hf.format import (
    ConfigJson,
    FileTensor,
    Format,
    activation,
    same,
    concatenated,
    concatenated_transposed,
    transposed,
    weight_and_bias,
)

BLOCK = "transformer.h.{}"


def read(raw: ConfigJson) -> ModelConfig:
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["n_embd"],
        num_hidden_layers=raw["n_layer"],
        num_attention_heads=raw["n_head"],
        intermediate_size=raw.get("n_inner") or 4 * raw["n_embd"],
        max_position_embeddings=raw.get("n_positions", 1024),
        position="learned",
        norm="layer_norm",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        hidden_act=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        hidden_dropout=raw.get("resid_pdrop", 0.1),
        attention_dropout=raw.get("attn_pdrop", 0.1),
        initializer_range=raw.get("initializer_range", 0.02),
    )


def write(config: ModelConfig) -> ConfigJson:
    names = {"gelu_tanh": "gelu_new"}
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": names.get(config.hidden_act, config.hidden_act),
        "tie_word_embeddings": config.tie_word_embeddings,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.initializer_range,
    }


def tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [
        same("transformer.wte.weight", "embedding.tokens.weight"),
        same("transformer.wpe.weight", "embedding.positions.weight"),
        *weight_and_bias(same, "transformer.ln_f", "stack.final_norm", True),
    ]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    for layer in range(config.num_hidden_layers):
        theirs, ours = BLOCK.format(layer), f"stack.blocks.{layer}"
        projections = tuple(f"{ours}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        stored += [
            *weight_and_bias(same, f"{theirs}.ln_1", f"{ours}.attention_norm", True),
            concatenated_transposed(f"{theirs}.attn.c_attn.weight", tuple(f"{name}.weight" for name in projections)),
            concatenated(f"{theirs}.attn.c_attn.bias", tuple(f"{name}.bias" for name in projections)),
            *weight_and_bias(transposed, f"{theirs}.attn.c_proj", f"{ours}.attention.o_proj", True),
            *weight_and_bias(same, f"{theirs}.ln_2", f"{ours}.feed_forward_norm", True),
            *weight_and_bias(transposed, f"{theirs}.mlp.c_fc", f"{ours}.feed_forward.up_proj", True),
            *weight_and_bias(transposed, f"{theirs}.mlp.c_proj", f"{ours}.feed_forward.down_proj", True),
        ]
    return stored


GPT2 = Format(
    "gpt2", "GPT2LMHeadModel", read, write, tensors,
    tied=("lm_head.weight",),
    required={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    ignored=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    prefix="transformer.",
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
)  # fmt: skip
