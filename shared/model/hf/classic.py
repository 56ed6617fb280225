"""Chapter 02. Formats of the classic families: GPT-2 (which GPT-3's published sizes use too), BERT, T5 and BLOOM.

A family is a table of keys, the choices that all its models share (`shared.model.families`), and its tensors.

GPT-2     [in, out] matrices; queries, keys and values in one
BERT      with the head that fills in masked words; its pooler and next-sentence head are not ours
BLOOM     ALiBi; normalised embeddings; queries, keys and values fused head by head
T5        two stacks, each with one table of relative biases, stored in its first block. The first T5 ties the head to the embedding and
          scales what goes into it by hidden_size ** -0.5; version 1.1 has a head of its own and a gated feed-forward layer. In files,
          both keep scores unscaled
"""

from shared.model.config import ModelConfig
from shared.model.families import BERT_CHOICES, BLOOM_CHOICES, GPT2_CHOICES, T5_CHOICES
from shared.model.hf.format import ConfigJson, FileTensor, Format, Key, activation, as_named, concatenated, concatenated_transposed
from shared.model.hf.format import interleaved_heads, read_keys, same, transposed, weight_and_bias, write_keys

GPT2_KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("n_embd"),
    "num_hidden_layers": Key("n_layer"),
    "num_attention_heads": Key("n_head"),
    "intermediate_size": Key("n_inner", None),
    "max_position_embeddings": Key("n_positions", 1024),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "hidden_act": Key("activation_function", "gelu_new"),
    "tie_word_embeddings": Key("tie_word_embeddings", True),
    "hidden_dropout": Key("resid_pdrop", 0.1),
    "attention_dropout": Key("attn_pdrop", 0.1),
    "initializer_range": Key("initializer_range", 0.02),
}


def read_gpt2(raw: ConfigJson) -> ModelConfig:
    return ModelConfig(**GPT2_CHOICES, **read_keys(GPT2_KEYS, raw))


def write_gpt2(config: ModelConfig) -> ConfigJson:
    return write_keys(GPT2_KEYS, config) | {"embd_pdrop": config.hidden_dropout}


def gpt2_tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [
        same("transformer.wte.weight", "embedding.tokens.weight"),
        same("transformer.wpe.weight", "embedding.positions.weight"),
        *weight_and_bias(same, "transformer.ln_f", "stack.final_norm", True),
    ]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"transformer.h.{layer}", f"stack.blocks.{layer}"
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
    "gpt2", "GPT2LMHeadModel", read_gpt2, write_gpt2, gpt2_tensors,
    tied=("lm_head.weight",),
    required={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    ignored=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    prefix="transformer.",
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
)  # fmt: skip


BERT_KEYS = as_named("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size") | {
    "max_position_embeddings": Key("max_position_embeddings", 512),
    "norm_eps": Key("layer_norm_eps", 1e-12),
    "hidden_act": Key("hidden_act", "gelu"),
    "type_vocab_size": Key("type_vocab_size", 2),
    "tie_word_embeddings": Key("tie_word_embeddings", True),
    "hidden_dropout": Key("hidden_dropout_prob", 0.1),
    "attention_dropout": Key("attention_probs_dropout_prob", 0.1),
    "initializer_range": Key("initializer_range", 0.02),
}


def read_bert(raw: ConfigJson) -> ModelConfig:
    return ModelConfig(**BERT_CHOICES, **read_keys(BERT_KEYS, raw))


def write_bert(config: ModelConfig) -> ConfigJson:
    return write_keys(BERT_KEYS, config)


def bert_tensors(config: ModelConfig) -> list[FileTensor]:
    pairs = [
        ("bert.embeddings.LayerNorm", "embedding.norm"),
        ("cls.predictions.transform.dense", "head.transform"),
        ("cls.predictions.transform.LayerNorm", "head.norm"),
    ]
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"bert.encoder.layer.{layer}", f"stack.blocks.{layer}"
        pairs += [
            (f"{theirs}.attention.self.query", f"{ours}.attention.q_proj"),
            (f"{theirs}.attention.self.key", f"{ours}.attention.k_proj"),
            (f"{theirs}.attention.self.value", f"{ours}.attention.v_proj"),
            (f"{theirs}.attention.output.dense", f"{ours}.attention.o_proj"),
            (f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm"),
            (f"{theirs}.intermediate.dense", f"{ours}.feed_forward.up_proj"),
            (f"{theirs}.output.dense", f"{ours}.feed_forward.down_proj"),
            (f"{theirs}.output.LayerNorm", f"{ours}.feed_forward_norm"),
        ]
    stored = [
        same("bert.embeddings.word_embeddings.weight", "embedding.tokens.weight"),
        same("bert.embeddings.position_embeddings.weight", "embedding.positions.weight"),
        same("bert.embeddings.token_type_embeddings.weight", "embedding.types.weight"),
        same("cls.predictions.bias" if config.tie_word_embeddings else "cls.predictions.decoder.bias", "head.linear.bias"),
    ]
    if not config.tie_word_embeddings:
        stored.append(same("cls.predictions.decoder.weight", "head.linear.weight"))
    return stored + [entry for theirs, ours in pairs for entry in weight_and_bias(same, theirs, ours, True)]


BERT = Format(
    "bert", "BertForMaskedLM", read_bert, write_bert, bert_tensors,
    tied=("cls.predictions.decoder.weight",),
    required={
        "is_decoder": (False,), "add_cross_attention": (False,), "position_embedding_type": ("absolute", None),
        "quantization_config": (None,),
    },
    ignored=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r".*\.position_ids", r"cls\.predictions\.(decoder\.)?bias"),
    renamed={".gamma": ".weight", ".beta": ".bias"},
    token_ids={"pad_token_id": 0},
)  # fmt: skip


BLOOM_KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "num_hidden_layers": Key("n_layer"),
    "num_attention_heads": Key("n_head"),
    "max_position_embeddings": Key("seq_length", 2048),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tie_word_embeddings": Key("tie_word_embeddings", True),
    "hidden_dropout": Key("hidden_dropout", 0.0),
    "attention_dropout": Key("attention_dropout", 0.0),
    "initializer_range": Key("initializer_range", 0.02),
}
OLDER_BLOOM = {"hidden_size": "n_embed", "n_head": "num_attention_heads"}  # today's key -> that of older files


def read_bloom(raw: ConfigJson) -> ModelConfig:
    sizes = {key: size for key, older in OLDER_BLOOM.items() if (size := raw.get(key) or raw.get(older))}
    rest = {key: value for key, value in raw.items() if key not in OLDER_BLOOM}
    return ModelConfig(**BLOOM_CHOICES, **read_keys(BLOOM_KEYS, rest | sizes))


def write_bloom(config: ModelConfig) -> ConfigJson:
    return write_keys(BLOOM_KEYS, config)


def bloom_tensors(config: ModelConfig) -> list[FileTensor]:
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
    "bloom", "BloomForCausalLM", read_bloom, write_bloom, bloom_tensors,
    tied=("lm_head.weight",),
    required={"apply_residual_connection_post_layernorm": (False,), "quantization_config": (None,)},
    prefix="transformer.",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip


FEED_FORWARD = {"relu": ("relu", False), "gated-gelu": ("gelu_tanh", True), "gated-silu": ("silu", True), "gelu": ("gelu", False)}
T5_KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("d_model"),
    "head_dim": Key("d_kv"),
    "intermediate_size": Key("d_ff"),
    "num_encoder_layers": Key("num_layers"),
    "num_hidden_layers": Key("num_decoder_layers", None),
    "num_attention_heads": Key("num_heads"),
    "max_position_embeddings": Key("n_positions", 512),
    "relative_attention_num_buckets": Key("relative_attention_num_buckets", 32),
    "relative_attention_max_distance": Key("relative_attention_max_distance", 128),
    "norm_eps": Key("layer_norm_epsilon", 1e-6),
    "tie_word_embeddings": Key("tie_word_embeddings", True),
    "hidden_dropout": Key("dropout_rate", 0.1),
}


def read_t5(raw: ConfigJson) -> ModelConfig:
    said = raw.get("feed_forward_proj", "relu")
    if said not in FEED_FORWARD:
        raise ValueError(f"feed_forward_proj {said!r} is not one of this model's: {', '.join(FEED_FORWARD)}.")
    act, gated = FEED_FORWARD[said]
    if gated and raw.get("dense_act_fn"):
        act = activation(raw["dense_act_fn"])
    if raw.get("tie_word_embeddings") is None:  # null stands for the default
        raw = raw | {"tie_word_embeddings": True}
    fields = T5_CHOICES | read_keys(T5_KEYS, raw) | {"hidden_act": act, "gated": gated}
    fields["num_hidden_layers"] = fields["num_hidden_layers"] or fields["num_encoder_layers"]
    scaled = raw.get("scale_decoder_outputs", fields["tie_word_embeddings"])
    return ModelConfig(
        **fields,
        attention_dropout=fields["hidden_dropout"],
        logit_scale=fields["hidden_size"] ** -0.5 if scaled else 1.0,
        initializer_range=0.02 * raw.get("initializer_factor", 1.0),
    )


def write_t5(config: ModelConfig) -> ConfigJson:
    names = {choice: name for name, choice in FEED_FORWARD.items()}
    return write_keys(T5_KEYS, config) | {
        "feed_forward_proj": names.get((config.hidden_act, config.gated), "relu"),
        "scale_decoder_outputs": config.logit_scale != 1.0,
        "is_encoder_decoder": True,
    }


def t5_tensors(config: ModelConfig) -> list[FileTensor]:
    stored = [same("shared.weight", "embedding.tokens.weight")]
    if not config.tie_word_embeddings:
        stored.append(same("lm_head.weight", "head.linear.weight"))
    return (
        stored
        + t5_stack("encoder", "encoder", config.num_encoder_layers, config)
        + t5_stack("decoder", "stack", config.num_hidden_layers, config)
    )


def t5_stack(theirs: str, ours: str, layers: int, config: ModelConfig) -> list[FileTensor]:
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
    "t5", "T5ForConditionalGeneration", read_t5, write_t5, t5_tensors,
    tied=("lm_head.weight",),
    tied_by_file=True,  # transformers 5 writes tie_word_embeddings as true for every T5
    required={"quantization_config": (None,)},
    token_ids={"eos_token_id": 1, "pad_token_id": 0},
    ignored=(r"(encoder|decoder)\.embed_tokens\.weight", r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
)  # fmt: skip
