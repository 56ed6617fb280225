"""RoPE in config.json: five places that may say it, in every combination, against transformers' own frequencies for each model type."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import shared.moe.hf  # noqa: F401, its formats
from shared.model.config import RopeScaling
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import read_folder
from shared.model.hf.registry import write_config
from shared.model.rope import rope_frequencies

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
TYPES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
}  # fmt: skip
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PARAMETERS = [None, {"rope_type": "default", "rope_theta": 1e6}, YARN | {"rope_theta": 1e6}, {"rope_type": "linear", "factor": 2.0}]
SCALINGS = [
    None, YARN, {"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    YARN | {"truncate": True},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    YARN | {"rope_theta": 5e5},
]  # fmt: skip
THETAS = [None, 2e5]
COMBINATIONS = list(product(range(len(PARAMETERS)), range(len(SCALINGS)), range(len(THETAS))))


def folder_of(tmp_path, kind, parameters, scaling, theta):
    said = {"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": theta}
    config = SIZES | EXPERTS.get(kind, {}) | {"model_type": kind, "architectures": [TYPES[kind]], "tie_word_embeddings": False}
    config |= {name: value for name, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def frequencies(folder) -> tuple[torch.Tensor, float]:
    """transformers' own, of a folder."""
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    return rotary.inv_freq, rotary.attention_scaling


def ours(folder) -> tuple[torch.Tensor, float]:
    return rope_frequencies(read_folder(folder)[1].resolved(), 100)


@pytest.mark.parametrize("kind", TYPES)
def test_every_combination_is_read_as_transformers_reads_it_or_refused(kind, tmp_path):
    refused = 0
    for numbers in COMBINATIONS:
        parameters, scaling, theta = (values[number] for values, number in zip((PARAMETERS, SCALINGS, THETAS), numbers, strict=True))
        folder = folder_of(tmp_path, kind, parameters, scaling, theta)
        lost = scaling and parameters and "rope_theta" in parameters and "rope_theta" not in scaling and theta is None
        if lost:
            refused += 1
            with pytest.raises(PretrainedError, match="rope_scaling stands beside rope_parameters"):
                ours(folder)
            continue
        wanted, found = frequencies(folder), ours(folder)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
        assert found[1] == pytest.approx(wanted[1], rel=1e-6), numbers
    assert refused == 10 and len(COMBINATIONS) == 56


def test_a_scaling_without_a_factor_and_one_for_each_kind_of_layer_are_refused(tmp_path):
    for scaling, sentence in (({"rope_type": "yarn"}, "has no factor"), ({"full_attention": YARN}, "for each kind of layer")):
        with pytest.raises(PretrainedError, match=sentence):
            ours(folder_of(tmp_path, "llama", None, scaling, None))


WRITTEN = [
    None, RopeScaling("linear", 2.0), RopeScaling("dynamic", 2.0), RopeScaling("yarn", 4.0, 128),
    RopeScaling("yarn", 4.0, 128, attention_factor=1.1, beta_fast=20.0),
    RopeScaling("llama3", 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0),
]  # fmt: skip
OLDER, NEWER = ("rope_theta", "rope_scaling"), ("rope_parameters",)


@pytest.mark.parametrize("scaling", WRITTEN, ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_a_written_folder_says_theta_where_both_versions_of_transformers_look(kind, scaling, tmp_path):
    """Version 4 and vLLM read `rope_theta` and `rope_scaling` at the top level, version 5 `rope_parameters` too: each alone says it all.

    These 48 folders were read by transformers 4.57.1 as well, with equal logits.
    """
    config = replace(read_folder(folder_of(tmp_path, kind, None, None, 2e5))[1], rope_scaling=scaling).resolved()
    _, raw = write_config(config, kind)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 2e5
    assert ("rope_scaling" in raw) == (scaling is not None)
    found = rope_frequencies(config, 100)
    for left_out in ((), NEWER, OLDER):
        (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in left_out}))
        wanted = frequencies(tmp_path)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
        assert found[1] == pytest.approx(wanted[1], rel=1e-6)
