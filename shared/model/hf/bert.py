"""Chapter 02. BERT's format, with the head that fills in masked words. Its pooler and next-sentence head are not ours."""

from shared.model.config import ModelConfig
from shared.model.hf.format import ConfigJson, FileTensor, Format, activation, same, weight_and_bias

SAME_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read(raw: ConfigJson) -> ModelConfig:
    return ModelConfig(
        **{key: raw[key] for key in SAME_KEYS},
        architecture="encoder",
        max_position_embeddings=raw.get("max_position_embeddings", 512),
        position="learned",
        norm="layer_norm",
        norm_eps=raw.get("layer_norm_eps", 1e-12),
        norm_position="post",
        embedding_norm=True,
        hidden_act=activation(raw.get("hidden_act", "gelu")),
        gated=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        type_vocab_size=raw.get("type_vocab_size", 2),
        head="mlm",
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        hidden_dropout=raw.get("hidden_dropout_prob", 0.1),
        attention_dropout=raw.get("attention_probs_dropout_prob", 0.1),
        initializer_range=raw.get("initializer_range", 0.02),
    )


def write(config: ModelConfig) -> ConfigJson:
    names = {"gelu_tanh": "gelu_new"}
    return {key: getattr(config, key) for key in SAME_KEYS} | {
        "max_position_embeddings": config.max_position_embeddings,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": names.get(config.hidden_act, config.hidden_act),
        "type_vocab_size": config.type_vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
    }


def tensors(config: ModelConfig) -> list[FileTensor]:
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
        same("cls.predictions.bias", "head.linear.bias"),
    ]
    if not config.tie_word_embeddings:
        stored.append(same("cls.predictions.decoder.weight", "head.linear.weight"))
    return stored + [entry for theirs, ours in pairs for entry in weight_and_bias(same, theirs, ours, True)]


BERT = Format(
    "bert", "BertForMaskedLM", read, write, tensors,
    tied=("cls.predictions.decoder.weight",),
    required={
        "is_decoder": (False,), "add_cross_attention": (False,), "position_embedding_type": ("absolute", None),
        "quantization_config": (None,),
    },
    ignored=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r".*\.position_ids", r"cls\.predictions\.decoder\.bias"),
    renamed={".gamma": ".weight", ".beta": ".bias"},
    token_ids={"pad_token_id": 0},
)  # fmt: skip
