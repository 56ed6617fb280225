"""Folders of transformers whose config.json leaves something out, or says something unusual: all are read, with equal logits."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import shared.moe.hf  # noqa: F401, its formats
from shared.model.hf.pretrained import load_pretrained
from shared.moe.builders import MIXTURE

IDS = torch.arange(1, 33)[None]
SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
DOTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
OWN = ("gpt2", "bloom", "t5")  # with names of their own for every size
FOLDERS = {
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e5}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e5}}),
    "yarn with an attention factor": ("qwen2", {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e5, "attention_factor": 1.2,
        "beta_fast": 20,
    }}),
    "llama3 without the original length": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e5,
        "original_max_position_embeddings": 64,
    }}),
    "heads of another size": ("llama", {"head_dim": 16}),
    "head_dim null": ("mistral", {"head_dim": None}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "no number of key heads": ("llama", {"num_key_value_heads": None}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "relu and all biases": ("llama", {"hidden_act": "relu", "attention_bias": True, "mlp_bias": True}),
    "keys left out": ("llama", {"rms_norm_eps": "gone", "hidden_act": "gone", "rope_theta": "gone", "tie_word_embeddings": "gone"}),
    "Qwen 2: a window from a block on": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen 2: layer types against max_window_layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
    "Qwen 2: a window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    "Qwen 3: layer types": ("qwen3", {
        "head_dim": 12, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": [FULL, SLIDING, FULL],
    }),
    "Qwen 3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "Mistral with a window": ("mistral", {"sliding_window": 4}),
    "Mistral without one": ("mistral", {"sliding_window": None}),
    "Mixtral, one expert a token": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "Qwen 3 MoE, normalised": ("qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16,
    }),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "dots.llm1 with groups": ("dots1", DOTS | {"head_dim": 12}),
    "GPT-2, untied, with n_inner": ("gpt2", {
        "vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40, "tie_word_embeddings": False,
    }),
    "BLOOM, six heads": ("bloom", {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "T5, two and three layers": ("t5", {
        "vocab_size": 96, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDERS)
def test_an_unusual_folder_is_read_as_transformers_reads_it(what, tmp_path):
    kind, said = FOLDERS[what]
    config = {"model_type": kind, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | ({} if kind in OWN else SIZES) | said
    config = {key: value for key, value in config.items() if value != "gone"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    family = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    made = family.from_config(AutoConfig.from_pretrained(tmp_path))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        made.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        more = {"decoder_input_ids": IDS} if kind == "t5" else {}
        wanted = family.from_pretrained(tmp_path, attn_implementation="eager").eval()(IDS, **more).logits
        torch.testing.assert_close(load_pretrained(tmp_path, builders=MIXTURE).eval()(IDS, **more), wanted, rtol=1e-5, atol=2e-5)
