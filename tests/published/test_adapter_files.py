"""Adapters that peft writes with its defaults: embedding or head is a target, the vocabulary has grown, a router is trained."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared.finetune.peft_format import load_adapter
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained
from shared.moe.builders import MIXTURE

IDS = torch.arange(1, 17)[None]
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=request.param)).save_pretrained(folder)
    return folder


def trained(base, folder, targets, change=lambda model: None):
    """An adapter of peft's whose updates are not zero, saved with its defaults; and its model's logits."""
    model = AutoModelForCausalLM.from_pretrained(base)
    change(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
        adapted.save_pretrained(folder)
        return adapted(IDS).logits


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "lm_head"], ["embed_tokens", "q_proj"], ["embed_tokens", "lm_head"]])
def test_the_bases_own_weights_in_an_adapter_are_left_aside(targets, base, tmp_path):
    wanted = trained(base, tmp_path, targets)
    mine = load_adapter(load_pretrained(base), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(mine(IDS), wanted, rtol=1e-4, atol=1e-5)


def test_a_vocabulary_that_has_grown_is_said(base, tmp_path):
    trained(base, tmp_path, ["q_proj"], lambda model: model.resize_token_embeddings(100))
    with pytest.raises(PretrainedError, match=r"as \[100, 32\], and the base has \[96, 32\]: it was trained after the vocabulary"):
        load_adapter(load_pretrained(base), tmp_path)


def test_another_embedding_than_the_bases_is_said(base, tmp_path):
    trained(base, tmp_path, ["embed_tokens"], lambda model: model.get_input_embeddings().weight.data.add_(1.0))
    with pytest.raises(PretrainedError, match="brings another .* than the base's"):
        load_adapter(load_pretrained(base), tmp_path)


def test_an_update_of_a_router_is_said(tmp_path):
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(PretrainedError, match="updates a router"):
        load_adapter(load_pretrained(tmp_path / "base", builders=MIXTURE), tmp_path / "adapter")
