"""Chapter 02. Presets: the published models (GPT-2, LLaMA, Qwen, Mistral, BERT, T5, BLOOM) as configurations.

A family is a handful of choices; a model of it adds its sizes. GPT-3 alternated dense and banded sparse attention, a pattern that
was never published in full; here it is dense everywhere, as reimplementations have it.
Sources: the papers' tables of sizes, and the `config.json` that was released with the weights.
"""

import difflib
from typing import Any

from shared.model.config import ModelConfig, RopeScaling

Choices = dict[str, Any]


def sizes(layers: int, hidden: int, heads: int, **more: Any) -> Choices:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads} | more


# What every model of a family has, whatever its size; `shared.model.hf.classic` reads and writes their files with it.
BIASES = {"norm": "layer_norm", "gated": False, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
GPT2_CHOICES = BIASES | {"position": "learned"}
BERT_CHOICES = BIASES | {
    "architecture": "encoder", "position": "learned", "norm_position": "post", "embedding_norm": True, "head": "mlm",
}  # fmt: skip
BLOOM_CHOICES = BIASES | {"position": "alibi", "embedding_norm": True, "hidden_act": "gelu_tanh"}
T5_CHOICES = {"architecture": "encoder-decoder", "position": "relative", "attention_scale": 1.0}

GPT2 = GPT2_CHOICES | {
    "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_act": "gelu_tanh", "tie_word_embeddings": True,
    "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
GPT3 = GPT2 | {"max_position_embeddings": 2048, "hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA1 = {"vocab_size": 32000, "max_position_embeddings": 2048, "norm_eps": 1e-6}
LLAMA2 = {"vocab_size": 32000, "max_position_embeddings": 4096}
LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "num_key_value_heads": 8}
LLAMA31 = LLAMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": RopeScaling("llama3", 8.0, original_max_position_embeddings=8192),
}
LLAMA32 = LLAMA31 | {
    "rope_scaling": RopeScaling("llama3", 32.0, original_max_position_embeddings=8192), "tie_word_embeddings": True,
}  # fmt: skip
QWEN2 = {"vocab_size": 152064, "max_position_embeddings": 131072, "rope_theta": 1e6, "norm_eps": 1e-6, "attention_bias": True}
QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_dim": 128}
MISTRAL = {"vocab_size": 32000, "max_position_embeddings": 32768, "num_key_value_heads": 8, "sliding_window": 4096}
BERT = BERT_CHOICES | {
    "vocab_size": 30522, "max_position_embeddings": 512, "norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2,
    "tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
T5 = T5_CHOICES | {
    "vocab_size": 32128, "max_position_embeddings": 512, "norm_eps": 1e-6, "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
T5_FIRST = T5 | {"hidden_act": "relu", "gated": False, "tie_word_embeddings": True}
T5_V11 = T5 | {"hidden_act": "gelu_tanh", "gated": True}
BLOOM = BLOOM_CHOICES | {"vocab_size": 250880, "max_position_embeddings": 2048, "tie_word_embeddings": True}

PRESETS: dict[str, Choices] = {
    "gpt2": GPT2 | sizes(12, 768, 12),
    "gpt2-medium": GPT2 | sizes(24, 1024, 16),
    "gpt2-large": GPT2 | sizes(36, 1280, 20),
    "gpt2-xl": GPT2 | sizes(48, 1600, 25),
    "gpt3-small": GPT3 | sizes(12, 768, 12),
    "gpt3-6.7b": GPT3 | sizes(32, 4096, 32),
    "gpt3-175b": GPT3 | sizes(96, 12288, 96),
    "llama-7b": LLAMA1 | sizes(32, 4096, 32, intermediate_size=11008),
    "llama-65b": LLAMA1 | sizes(80, 8192, 64, intermediate_size=22016),
    "llama-2-7b": LLAMA2 | sizes(32, 4096, 32, intermediate_size=11008),
    "llama-2-70b": LLAMA2 | sizes(80, 8192, 64, intermediate_size=28672, num_key_value_heads=8),
    "llama-3-8b": LLAMA3 | sizes(32, 4096, 32, intermediate_size=14336),
    "llama-3.1-8b": LLAMA31 | sizes(32, 4096, 32, intermediate_size=14336),
    "llama-3.1-70b": LLAMA31 | sizes(80, 8192, 64, intermediate_size=28672),
    "llama-3.2-1b": LLAMA32 | sizes(16, 2048, 32, intermediate_size=8192),
    "llama-3.2-3b": LLAMA32 | sizes(28, 3072, 24, intermediate_size=8192, head_dim=128),
    "qwen2-0.5b": QWEN2 | sizes(24, 896, 14, intermediate_size=4864, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2-7b": QWEN2 | sizes(28, 3584, 28, intermediate_size=18944, num_key_value_heads=4),
    "qwen2.5-1.5b": QWEN2 | sizes(28, 1536, 12, intermediate_size=8960, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "qwen3-0.6b": QWEN3 | sizes(28, 1024, 16, intermediate_size=3072, num_key_value_heads=8, tie_word_embeddings=True),
    "qwen3-8b": QWEN3 | sizes(36, 4096, 32, intermediate_size=12288, num_key_value_heads=8),
    "mistral-7b": MISTRAL | sizes(32, 4096, 32, intermediate_size=14336),
    "mistral-7b-v0.3": MISTRAL
    | sizes(32, 4096, 32, intermediate_size=14336, vocab_size=32768, sliding_window=None, rope_theta=1e6),
    "bert-base": BERT | sizes(12, 768, 12),
    "bert-large": BERT | sizes(24, 1024, 16),
    "t5-small": T5_FIRST | sizes(6, 512, 8, head_dim=64, intermediate_size=2048, logit_scale=512**-0.5),
    "t5-base": T5_FIRST | sizes(12, 768, 12, head_dim=64, intermediate_size=3072, logit_scale=768**-0.5),
    "t5-v1.1-base": T5_V11 | sizes(12, 768, 12, head_dim=64, intermediate_size=2048),
    "bloom-560m": BLOOM | sizes(24, 1024, 16),
    "bloom-176b": BLOOM | sizes(70, 14336, 112),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a published model, with any of its fields changed: `preset("gpt2", num_hidden_layers=2)`.

    Raises:
        ValueError: no such model (the nearest names are offered), or the changes make no valid one.
        TypeError: a change names no field of `ModelConfig`.
    """
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        offered = f"Did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"There is no model {name!r} here. {offered}These are: {', '.join(PRESETS)}.")
    chosen = PRESETS[name] | changes
    if "logit_scale" in PRESETS[name] and "logit_scale" not in changes:
        chosen["logit_scale"] = chosen["hidden_size"] ** -0.5  # goes with the width
    return ModelConfig(**chosen)
