"""Every setting of peft's adapter_config.json: read, refused by its name, or known to be of no consequence; against peft's own reload."""

import dataclasses
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared.finetune.peft_format import CONFIG, READ, REFUSED, UNUSED, load_adapter
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained

IDS = torch.arange(1, 17)[None]
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
QV = {"target_modules": ["q_proj", "v_proj"]}
SAME = {  # what peft computes
    "rsLoRA": QV | {"use_rslora": True},
    "a pattern of alphas": QV | {"alpha_pattern": {"q_proj": 32, r"layers\.1\.self_attn\.v_proj": 2}},
    "anchored and overlapping patterns": QV | {
        "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 3, r".*q_proj": 40, "proj": 7},
        "rank_pattern": {r"model\.layers\.[01]\.self_attn\.v_proj": 2, "q_proj": 6},
    },
    "a pattern of ranks under rsLoRA": QV | {"rank_pattern": {"v_proj": 2}, "use_rslora": True},
    "DoRA": QV | {"use_dora": True},
    "DoRA with patterns": QV | {"use_dora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"0\.self_attn\.q_proj": 3}},
    "layers to transform": QV | {"layers_to_transform": [0, 2]},
    "one layer, by a pattern": QV | {"layers_to_transform": 1, "layers_pattern": "layers"},
    "modules left out": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "model.layers.0.self_attn.q_proj"]},
    "modules left out by a regex": QV | {"exclude_modules": r".*\.1\.self_attn\..*"},
    "modules by a regex": {"target_modules": r".*layers\.[02]\.(self_attn\.o_proj|mlp\.up_proj)"},
    "fan_in_fan_out, which peft sets back": QV | {"fan_in_fan_out": True},
    "gaussian": QV | {"init_lora_weights": "gaussian"},
    "orthogonal": QV | {"init_lora_weights": "orthogonal"},
}  # fmt: skip
REFUSALS = {
    "all biases": ("bias", QV | {"bias": "all"}),
    "biases of LoRA": ("bias", QV | {"bias": "lora_only"}),
    "a bias in B": ("lora_bias", {"target_modules": ["q_proj"], "lora_bias": True}),
    "modules to save": ("modules_to_save", QV | {"modules_to_save": ["lm_head"]}),
    "new tokens": ("trainable_token_indices", QV | {"trainable_token_indices": [1, 5]}),
    "PiSSA": ("init_lora_weights", QV | {"init_lora_weights": "pissa"}),
    "OLoRA": ("init_lora_weights", QV | {"init_lora_weights": "olora"}),
    "repeated layers": ("layer_replication", QV | {"layer_replication": [[0, 2], [1, 3]]}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True)).save_pretrained(folder)
    return folder


def save(base, folder, settings) -> None:
    """An adapter whose values are not the initial ones."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**{"r": 4, "lora_alpha": 8} | settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.2)
        adapted.save_pretrained(folder)


@pytest.mark.parametrize("what", SAME)
def test_what_peft_reloads_is_what_is_loaded_here(what, base, tmp_path):
    save(base, tmp_path, SAME[what])
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad(), warnings.catch_warnings():
        before = plain(IDS).logits
        wanted = PeftModel.from_pretrained(plain, tmp_path).eval()(IDS).logits
        warnings.simplefilter("error")
        found = load_adapter(load_pretrained(base), tmp_path).eval()(IDS)
    assert (wanted - before).abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_updates_are_in_the_file_twice(targets, tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")
    save(tmp_path / "base", tmp_path, {"target_modules": targets, "ensure_weight_tying": True})
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path).eval()(IDS).logits
        found = load_adapter(load_pretrained(tmp_path / "base"), tmp_path).eval()(IDS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_not_built_is_refused_by_its_setting(what, base, tmp_path):
    key, settings = REFUSALS[what]
    save(base, tmp_path, settings)
    with pytest.raises(PretrainedError, match=f"has {key} .* merge it in peft"):
        load_adapter(load_pretrained(base), tmp_path)


def fields_of(made) -> set[str]:
    return {each.name for each in dataclasses.fields(made)}


@pytest.mark.parametrize("made", [LoraConfig, PromptTuningConfig, PrefixTuningConfig])
def test_every_setting_of_the_installed_peft_has_its_place(made):
    """One that a newer peft adds fails here: read it, refuse it, or say that it changes nothing."""
    known = {*READ, *REFUSED, *UNUSED}
    assert fields_of(made) <= known, sorted(fields_of(made) - known)


def test_each_setting_has_one_place_and_exists():
    every = fields_of(LoraConfig) | fields_of(PromptTuningConfig) | fields_of(PrefixTuningConfig)
    places = [*READ, *REFUSED, *UNUSED]
    assert len(places) == len(set(places)) and set(places) <= every


def test_a_setting_of_a_newer_peft_is_named(base, tmp_path):
    save(base, tmp_path, QV)
    raw = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(raw | {"use_somelora": True, "other_config": None}))
    with pytest.warns(UserWarning, match="has use_somelora, which is not known here"):
        load_adapter(load_pretrained(base), tmp_path)
