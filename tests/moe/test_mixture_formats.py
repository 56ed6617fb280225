"""Mixtral, OLMoE, Qwen 3 MoE and dots.llm1 from and to Hugging Face's files: equal logits, equal gradients, nothing lost."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import Dots1Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from shared.course.errors import CourseError
from shared.model.config import ModelConfig
from shared.model.counting import count_parameters, parameter_counts
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.hf.registry import FORMATS, read_config, write_config
from shared.model.init import initial_value
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.moe.hf import MIXTURES
from shared.moe.layer import mixture_layers
from shared.moe.upcycle import upcycle

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
THEIRS = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=40, num_local_experts=5, head_dim=8),
    "mixtral, window": MixtralConfig(**SIZES, intermediate_size=40, num_local_experts=5, sliding_window=7),
    "olmoe": OlmoeConfig(**SIZES, intermediate_size=40, num_experts=5),
    "olmoe, normalised": OlmoeConfig(**SIZES, intermediate_size=40, num_experts=5, norm_topk_prob=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, intermediate_size=72, moe_intermediate_size=40, num_experts=5, head_dim=16, norm_topk_prob=True),
    "olmoe, biases": OlmoeConfig(**SIZES, intermediate_size=40, num_experts=5, attention_bias=True),
    "qwen3_moe, window": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=40, num_experts=5, attention_bias=True, use_sliding_window=True, sliding_window=7
    ),
    "dots1, windows": Dots1Config(
        **SIZES, moe_intermediate_size=40, n_routed_experts=5, n_shared_experts=1, attention_bias=True, sliding_window=7,
        max_window_layers=1,
    ),
    "dots1": Dots1Config(
        **SIZES, intermediate_size=72, moe_intermediate_size=40, n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, head_dim=12,
    ),
}  # fmt: skip
by_family = pytest.mark.parametrize("config", THEIRS.values(), ids=THEIRS)
IDS = torch.randint(3, 97, (3, 19), generator=torch.Generator().manual_seed(0))


def oracle(config) -> torch.nn.Module:
    """A model of transformers in which every number is random, norms and biases of the choice included."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = 1 if name.endswith("norm.weight") else 0
            if tensor.is_floating_point():
                tensor.copy_(spread + 0.2 * torch.randn(tensor.shape, generator=generator))
    return model


@by_family
def test_logits_and_gradients_are_those_of_transformers(config, tmp_path):
    theirs = oracle(config)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load_pretrained(tmp_path / "weights", builders=MIXTURE)
    assert count_parameters(ours) == parameter_counts(ours.config)
    weights = torch.randn(3, 19, 97, generator=torch.Generator().manual_seed(2))
    found, expected = ours(IDS), theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")  # their gradients as weights, by the names of ours
    expected = dict(load_pretrained(tmp_path / "gradients", builders=MIXTURE).named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - expected[name]).norm() < 1e-4 * expected[name].norm(), name


@by_family
def test_an_exported_model_is_the_same_in_transformers(config, tmp_path):
    oracle(config).save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", builders=MIXTURE)
    save_pretrained(ours, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == config.model_type
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(again(IDS).logits, ours(IDS), rtol=0, atol=1e-5 * ours(IDS).abs().max().item())
    reloaded = load_pretrained(tmp_path / "ours", builders=MIXTURE)
    assert reloaded.config == ours.config
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, dict(ours.named_parameters())[name]), name


def test_norms_over_the_projection_are_not_those_over_heads(tmp_path):
    """The negative control of OLMoE: with the other norm its logits differ."""
    oracle(THEIRS["olmoe"]).save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, builders=MIXTURE)
    expected = ours(IDS)
    for block in ours.stack.blocks.values():
        block.attention.norm_heads = True
        for norm in (block.attention.q_norm, block.attention.k_norm):
            norm.weight = torch.nn.Parameter(norm.weight[:12])
    assert (ours(IDS) - expected).abs().max() > 0.01


def test_the_bias_of_the_choice_is_kept_and_steers(tmp_path):
    oracle(THEIRS["dots1"]).save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, builders=MIXTURE)
    router = mixture_layers(ours)[0].router
    assert router.bias.abs().max() > 0.1 and not router.bias.requires_grad
    before = ours(IDS)
    router.bias.zero_()
    assert (ours(IDS) - before).abs().max() > 1e-3


def test_what_no_format_holds_is_refused():
    config = MixtureModelConfig(experts=MixtureConfig(4, 32, scoring="sigmoid"))
    with pytest.raises(CourseError, match="would lose: experts MixtureConfig"):
        write_config(config)
    training = {"balance_coefficient": 0.3, "z_coefficient": 1e-3, "implementation": "loop", "capacity_factor": 2.0}
    plain = MixtureModelConfig(experts=MixtureConfig(4, 32, **training))
    known, raw = write_config(plain)
    assert known.model_type == "mixtral" and raw["intermediate_size"] == 32, "training and implementation are no part of the model"
    for known, changes in (("mixtral", {}), ("qwen3_moe", {"qk_norm": True}), ("olmoe", {"qk_norm": True, "qk_norm_over": "projection"})):
        written = write_config(replace(plain, **changes))
        assert written[0].model_type == known
        assert "router_aux_loss_coef" not in written[1], "transformers' coefficient has another scale, and reading leaves it out too"
    assert write_config(ModelConfig())[0].model_type == "llama", "a dense model has the format that it had"


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}])
def test_layers_that_are_not_built_are_refused(changes):
    raw = THEIRS["qwen3_moe"].to_dict() | changes
    with pytest.raises(ValueError, match=next(iter(changes))):
        read_config(raw)


@pytest.mark.parametrize("family", MIXTURES)
def test_what_a_file_leaves_out_is_what_transformers_takes(family):
    default = transformers.AutoConfig.for_model(family)
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert FORMATS[family].token_ids.get(key) == getattr(default, key, None), key
    sizes = SIZES | {"model_type": family, "intermediate_size": 40, "n_routed_experts": 8, "n_shared_experts": 1}
    if family != "dots1":  # whose files must give what has no default
        sizes = {key: value for key, value in sizes.items() if key not in ("num_experts_per_tok", "n_routed_experts", "n_shared_experts")}
    default = transformers.AutoConfig.for_model(**sizes)
    assert read_config(sizes)[1] == read_config(default.to_dict())[1]


def test_an_imported_model_has_no_balance_loss_and_a_window_that_is_off_is_none():
    for config in THEIRS.values():
        assert read_config(config.to_dict())[1].experts.balance_coefficient == 0, "as in transformers, where one must ask for it"
    raw = THEIRS["qwen3_moe, window"].to_dict() | {"use_sliding_window": False}
    assert read_config(raw)[1].sliding_window is None


def test_queries_that_are_clipped_are_refused():
    with pytest.raises(ValueError, match="clip_qkv"):
        read_config(THEIRS["olmoe"].to_dict() | {"clip_qkv": 8.0})


@pytest.mark.parametrize(("family", "key"), [("olmoe", "num_experts"), ("qwen3_moe", "num_experts"), ("dots1", "n_routed_experts")])
def test_the_number_of_experts_has_a_name_in_each_version_of_transformers(family, key):
    raw = {name: value for name, value in THEIRS[family].to_dict().items() if name not in (key, "num_local_experts")}
    for name in (key, "num_local_experts"):
        assert read_config(raw | {name: 8})[1].experts.num_experts == 8


def test_an_expert_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    oracle(THEIRS["mixtral"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PretrainedError, match=r"missing: model.layers.1.block_sparse_moe.experts.3.w2.weight"):
        load_pretrained(tmp_path, builders=MIXTURE)


DENSE = ModelConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_upcycled_models_first_logits_are_the_dense_ones(k):
    dense = TransformerModel(DENSE, seed=3).double()
    mixture = upcycle(dense, MixtureConfig(4, 56, num_experts_per_tok=k, bias_update_rate=1e-3))
    torch.testing.assert_close(mixture(IDS), dense(IDS), rtol=1e-12, atol=1e-13)
    router = mixture.stack.blocks["1"].feed_forward.router.weight
    drawn = initial_value("stack.blocks.1.feed_forward.router.weight", router, mixture.config, 0)
    assert torch.equal(router, drawn.double()), "a router begins as in a new model"
    assert not upcycle(dense, MixtureConfig(4, 56, first_k_dense=1)).config.experts.is_sparse(0)


def test_routers_of_an_upcycled_model_in_16_bits_keep_their_precision():
    dense = TransformerModel(DENSE, seed=3).bfloat16()
    mixture = upcycle(dense, MixtureConfig(4, 56, bias_update_rate=1e-3))
    wide = {name for name, parameter in mixture.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {f"stack.blocks.{layer}.feed_forward.router.{name}" for layer in (0, 1) for name in ("weight", "bias")}
    assert {parameter.dtype for parameter in mixture.parameters()} == {torch.float32, torch.bfloat16}
    router = mixture_layers(mixture)[1].router.weight
    assert torch.equal(router, initial_value("stack.blocks.1.feed_forward.router.weight", router, mixture.config, 0))
    torch.testing.assert_close(mixture(IDS), dense(IDS), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("experts", "named"),
    [
        (MixtureConfig(4, 57), "moe_intermediate_size"),
        (MixtureConfig(4, 56, norm_topk_prob=False), "norm_topk_prob"),
        (MixtureConfig(4, 56, routed_scaling_factor=2.5), "routed_scaling_factor"),
        (MixtureConfig(4, 56, num_shared_experts=1), "num_shared_experts"),
    ],
)
def test_an_upcycling_that_would_change_the_logits_is_refused(experts, named):
    with pytest.raises(CourseError, match=named):
        upcycle(TransformerModel(DENSE), experts)


def test_an_upcycled_model_keeps_its_token_ids_draws_routers_by_the_seed_and_is_not_upcycled_again():
    dense = TransformerModel(DENSE)
    dense.token_ids = {"eos_token_id": 5}
    first, other = (upcycle(dense, MixtureConfig(4, 56), seed) for seed in (0, 1))
    assert first.token_ids == {"eos_token_id": 5}
    routers = [mixture_layers(model)[0].router.weight for model in (first, other)]
    assert not torch.equal(*routers)
    with pytest.raises(CourseError, match="has experts already"):
        upcycle(first, MixtureConfig(4, 56))
