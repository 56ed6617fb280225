"""Chapter 02. T5's format: two stacks, each with one table of relative biases, stored in its first block.

The first T5 ties the head to the embedding and scales what goes into it by hidden_size ** -0.5; version 1.1 has a head of its own
and a gated feed-forward layer. In files, both keep scores unscaled.
"""

from dataclasses import replace

from shared.model.config import ModelConfig
from shared.model.hf.format import ConfigJson, FileTensor, Format, activation, same

FEED_FORWARD = {"relu": ("relu", False), "gated-gelu": ("gelu_tanh", True), "gated-silu": ("silu", True), "gelu": ("gelu", False)}


def read(raw: ConfigJson) -> ModelConfig:
    said = raw.get("feed_forward_proj", "relu")
    if said not in FEED_FORWARD:
        raise ValueError(f"feed_forward_proj {said!r} is not one of this model's: {', '.join(FEED_FORWARD)}.")
    act, gated = FEED_FORWARD[said]
    if gated and raw.get("dense_act_fn"):
        act = activation(raw["dense_act_fn"])
    tied = raw.get("tie_word_embeddings", True)
    scaled = raw.get("scale_decoder_outputs", tied)
    config = ModelConfig(
        architecture="encoder-decoder",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["d_model"],
        num_hidden_layers=raw.get("num_decoder_layers") or raw["num_layers"],
        num_encoder_layers=raw["num_layers"],
        num_attention_heads=raw["num_heads"],
        head_dim=raw["d_kv"],
        intermediate_size=raw["d_ff"],
        max_position_embeddings=raw.get("n_positions", 512),
        position="relative",
        relative_attention_num_buckets=raw.get("relative_attention_num_buckets", 32),
        relative_attention_max_distance=raw.get("relative_attention_max_distance", 128),
        norm_eps=raw.get("layer_norm_epsilon", 1e-6),
        hidden_act=act,
        gated=gated,
        attention_scale=1.0,
        tie_word_embeddings=tied,
        logit_scale=raw["d_model"] ** -0.5 if scaled else 1.0,
        hidden_dropout=raw.get("dropout_rate", 0.1),
        attention_dropout=raw.get("dropout_rate", 0.1),
    )
    return replace(config, initializer_range=0.02 * raw.get("initializer_factor", 1.0))


def write(config: ModelConfig) -> ConfigJson:
    names = {choice: name for name, choice in FEED_FORWARD.items()}
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_kv": config.head_dim,
        "d_ff": config.intermediate_size,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": names.get((config.hidden_act, config.gated), "relu"),
        "tie_word_embeddings": config.tie_word_embeddings,
        "scale_decoder_outputs": config.logit_scale != 1.0,
        "dropout_rate": config.hidden_dropout,
        "is_encoder_decoder": True,
    }


def tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [same("shared.weight", "embedding.tokens.weight")]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    return (
        stored
        + stack("encoder", "encoder", config.num_encoder_layers, config)
        + stack("decoder", "stack", config.num_hidden_layers, config)
    )


def stack(theirs: str, ours: str, layers: int, config: ModelConfig) -> list[FileTensor]:
    stored = [
        same(f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{ours}.relative_bias.weight"),
        same(f"{theirs}.final_layer_norm.weight", f"{ours}.final_norm.weight"),
    ]
    sublayers = [("SelfAttention", "attention")] + ([("EncDecAttention", "cross_attention")] if theirs == "decoder" else [])
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"} if config.gated else {"wi": "up_proj", "wo": "down_proj"}
    for layer in range(layers):
        block, our_block = f"{theirs}.block.{layer}.layer", f"{ours}.blocks.{layer}"
        for index, (their_name, our_name) in enumerate(sublayers):
            stored.append(same(f"{block}.{index}.layer_norm.weight", f"{our_block}.{our_name}_norm.weight"))
            for part in "qkvo":
                stored.append(same(f"{block}.{index}.{their_name}.{part}.weight", f"{our_block}.{our_name}.{part}_proj.weight"))
        last = len(sublayers)
        stored.append(same(f"{block}.{last}.layer_norm.weight", f"{our_block}.feed_forward_norm.weight"))
        for their_name, our_name in names.items():
            stored.append(same(f"{block}.{last}.DenseReluDense.{their_name}.weight", f"{our_block}.feed_forward.{our_name}.weight"))
    return stored


T5 = Format(
    "t5", "T5ForConditionalGeneration", read, write, tensors,
    tied=("lm_head.weight",),
    tied_by_file=True,  # transformers 5 writes tie_word_embeddings as true for every T5
    required={"quantization_config": (None,)},
    token_ids={"eos_token_id": 1, "pad_token_id": 0},
    ignored=(r"(encoder|decoder)\.embed_tokens\.weight", r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
)  # fmt: skip
