"""Folders with other names than a model's own save_pretrained gives: a bare model's, and a state dict's with stacked experts."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Dots1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, open_pretrained
from shared.moe.builders import MIXTURE
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.reward_model import load_reward_model
from shared.trainer.models import RUN_AXES

IDS = torch.arange(1, 17)[None]
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DENSE = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_labels=1, pad_token_id=0),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, moe_intermediate_size=16),
    "olmoe": OlmoeConfig(**SIZES, **EXPERTS),
    "dots1": Dots1Config(
        **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, head_dim=8,
        n_shared_experts=1, n_group=1, topk_group=1,
    ),
}  # fmt: skip


def mine(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_pretrained(folder, builders=MIXTURE).eval()(IDS)


@pytest.mark.parametrize("kind", DENSE)
def test_a_bare_tied_model_is_read_with_the_embedding_as_its_head(kind, tmp_path):
    config = DENSE[kind](**SIZES, head_dim=8, tie_word_embeddings=True)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    theirs, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"]
    with torch.no_grad():
        torch.testing.assert_close(mine(tmp_path), theirs.eval()(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_bare_model_whose_head_is_not_tied_lacks_it_and_says_so(tmp_path):
    AutoModel.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match="holds a bare model without a head, .* set tie_word_embeddings to true"):
        load_pretrained(tmp_path)


def stacked_folder(kind, folder, family=AutoModelForCausalLM):
    """The state dict as it is in memory, which transformers loads."""
    torch.manual_seed(0)
    theirs = family.from_config(MIXTURES[kind]).eval()
    theirs.config.save_pretrained(folder)
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    with torch.no_grad():
        return theirs(IDS).logits


@pytest.mark.parametrize("kind", MIXTURES)
def test_stacked_experts_are_read(kind, tmp_path):
    wanted = stacked_folder(kind, tmp_path)
    torch.testing.assert_close(mine(tmp_path), wanted, rtol=1e-5, atol=1e-5)


def test_a_reward_model_with_stacked_experts_is_read(tmp_path):
    stacked_folder("mixtral", tmp_path, AutoModelForSequenceClassification)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        last = load_reward_model(tmp_path, builders=MIXTURE).eval()(IDS)[0, -1]
        torch.testing.assert_close(last, theirs(IDS).logits[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["dp2_ep2", "tp2"])
def test_ranks_read_their_slices_of_stacked_experts(layout, tmp_path):
    stacked_folder("mixtral", tmp_path)
    expected = dict(load_pretrained(tmp_path, builders=MIXTURE).named_parameters())

    def work(world):
        parallel = apply_parallel(open_pretrained(tmp_path, builders=MIXTURE), Mesh(parse_layout(layout), world), axes=RUN_AXES)
        return {name: tensor for name, tensor in parallel.whole_weights() if tensor is not None}

    for weights in run_threads(work, 2):
        assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
