"""Floor 2 by itself: initial weights, counts, roles, presets, what a configuration refuses, and chapter 01's loop on it."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from shared.loop import train
from shared.loss import next_token_objective
from shared.model.config import ModelConfig, RopeScaling
from shared.model.counting import count_parameters, parameter_counts
from shared.model.families import PRESETS, preset
from shared.model.hf.registry import FORMATS, write_config
from shared.model.init import initialize, materialize
from shared.model.roles import ROLES, parameters_by_role, role_of
from shared.model.transformer import TransformerModel, keep_part

SMALL = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 64}
IDS = torch.randint(97, (2, 19), generator=torch.Generator().manual_seed(0))


def small(name: str = "llama-7b", **changes) -> ModelConfig:
    """A family's architecture in a small size."""
    return preset(name, **SMALL | {"head_dim": None, "intermediate_size": None, "num_key_value_heads": 2} | changes)


FAMILIES = ["gpt2", "llama-3.1-8b", "qwen2-0.5b", "qwen3-0.6b", "mistral-7b", "bert-base", "t5-small", "t5-v1.1-base", "bloom-560m"]
by_family = pytest.mark.parametrize("name", FAMILIES)


@by_family
def test_parameter_counts_by_formula_equal_the_built_model(name):
    config = small(name, num_encoder_layers=5 if name.startswith("t5") else None)
    assert parameter_counts(config) == count_parameters(TransformerModel(config))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("llama-7b", 6_738_415_616), ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400), ("qwen2-0.5b", 494_032_768), ("mistral-7b", 7_241_732_096),
        ("bert-base", 109_514_298), ("t5-small", 60_506_624), ("bloom-560m", 559_214_592),
    ],
)  # fmt: skip
def test_counts_are_the_published_ones(name, published):
    assert sum(parameter_counts(preset(name)).values()) == published


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2-7b", "t5-v1.1-base", "gpt3-6.7b", "bert-large", "llama-3.1-70b", "bloom-176b"])
def test_parameter_counts_equal_transformers_at_full_size(name):
    found, told = write_config(preset(name), None if name != "qwen2-7b" else "qwen2")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**told)
        oracle = getattr(transformers, found.architecture)(config)
    untied = told["vocab_size"] * told["d_model"] if name == "t5-v1.1-base" else 0  # transformers builds v1.1 with a tied head
    assert sum(parameter_counts(preset(name)).values()) == sum(p.numel() for p in oracle.parameters()) + untied


@by_family
def test_every_preset_finds_its_format(name):
    family = name.split("-")[0].rstrip(".123") if name.startswith("llama") else name.split("-")[0]
    found, _ = write_config(preset(name))
    assert found.model_type == family and found.model_type in FORMATS


# Initial weights.


def test_initial_weights_depend_on_name_and_seed_only():
    config = small()
    model = TransformerModel(config, seed=3)
    torch.manual_seed(12345)
    torch.randn(17)
    other = TransformerModel(config, seed=3)
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name
    different = TransformerModel(config, seed=4)
    assert not torch.equal(model.stack.blocks["0"].attention.q_proj.weight, different.stack.blocks["0"].attention.q_proj.weight)
    assert not torch.equal(model.stack.blocks["0"].attention.q_proj.weight, model.stack.blocks["1"].attention.q_proj.weight)


def test_initial_weights_do_not_depend_on_the_order_of_modules():
    model = TransformerModel(small(), seed=3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.stack.blocks = nn.ModuleDict(dict(reversed(model.stack.blocks.items())))
    model.stack, model.embedding = model.stack, model.embedding
    assert list(dict(model.named_parameters())) != list(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    initialize(model, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_part_of_a_model_starts_like_the_whole(tied):
    config = small("gpt2", tie_word_embeddings=tied, num_key_value_heads=None)
    whole = TransformerModel(config, seed=3)
    logical = {whole.logical_name(name): parameter for name, parameter in whole.named_parameters()}
    seen = set()
    for blocks, first, last in ((range(1), True, False), (range(1, 2), False, False), (range(2, 3), False, True)):
        with torch.device("meta"):
            part = keep_part(TransformerModel(config), blocks, embedding=first, head=last)
        materialize(part, "cpu", seed=3)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, logical[part.logical_name(name)]), name
            seen.add(part.logical_name(name))
    assert seen == set(logical)


def test_scale_of_initial_weights():
    model = TransformerModel(preset("gpt2", hidden_size=256, num_hidden_layers=8, num_attention_heads=4, vocab_size=97))
    block = model.stack.blocks["5"]
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.feed_forward.down_proj.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)
    assert (block.attention_norm.weight == 1).all() and (block.attention_norm.bias == 0).all() and (block.attention.q_proj.bias == 0).all()
    bert = TransformerModel(small("bert-base", num_key_value_heads=None, hidden_size=192))
    assert bert.stack.blocks["2"].feed_forward.down_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    t5 = TransformerModel(small("t5-small", hidden_size=192, head_dim=64))
    assert t5.stack.blocks["2"].attention.q_proj.weight.std().item() == pytest.approx(0.02 / 8, rel=0.02)
    assert t5.encoder.blocks["2"].attention.o_proj.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.02)
    assert t5.stack.blocks["2"].attention.o_proj.weight.std().item() == pytest.approx(0.02 / 9**0.5, rel=0.02)


# Roles.


def test_every_parameter_has_the_role_that_its_use_gives_it():
    expected = {
        "embedding": r"embedding\.(tokens|positions|types)\.weight|head\.linear\.weight|(stack|encoder)\.relative_bias\.weight",
        "norm": r".*norm\.(weight|bias)",
        "bias": r".*(_proj|transform|linear)\.bias",
        "matrix": r".*(_proj|transform)\.weight",
        "expert": r".*\.experts\..*",
    }
    for name in FAMILIES:
        grouped = parameters_by_role(TransformerModel(small(name, tie_word_embeddings=False)))
        for role, parameters in grouped.items():
            assert all(re.fullmatch(expected[role], parameter_name) for parameter_name in parameters), (role, list(parameters))
        assert sum(map(len, grouped.values())) == len(list(TransformerModel(small(name, tie_word_embeddings=False)).parameters()))


def test_a_parameter_can_say_its_role_itself():
    parameter = nn.Parameter(torch.zeros(2))
    assert role_of("stack.blocks.0.feed_forward.router.weight", parameter) == "matrix"
    assert role_of("stack.blocks.0.feed_forward.experts.up_proj", parameter) == "expert"
    parameter.role = "norm"
    assert role_of("stack.blocks.0.feed_forward.router.weight", parameter) == "norm"
    parameter.role = "matrx"
    with pytest.raises(ValueError, match=f"'matrx'.*{', '.join(ROLES)}"):
        role_of("x.weight", parameter)


# Configuration.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": "ropee"}, "position is 'ropee': give one of .*Did you mean 'rope'"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ({"num_attention_heads": 5}, "not a multiple of num_attention_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "turns pairs of dimensions"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0: give at least 0 and below 1"),
        ({"sliding_window": 4, "architecture": "encoder"}, "looks back only"),
        ({"layer_types": ("full_attention",)}, "one entry for each block"),
        ({"layer_types": ("sliding_attention",) * 3}, "needs sliding_window"),
        ({"position": "alibi", "rope_scaling": RopeScaling("linear", 2.0)}, "needs position 'rope'"),
        ({"attention": "eager", "attention_dropout": 0.1}, "eager attention has no dropout"),
        ({"attention": "naive"}, "one of sdpa, eager. Did you mean 'eager'"),
        ({"attention": "fused"}, "Did you mean 'sdpa'"),
        ({"num_encoder_layers": 2}, "needs architecture 'encoder-decoder'"),
    ],
)
def test_a_configuration_refuses_what_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**SMALL | changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("lama3", 2.0), "Did you mean 'llama3'"),
        (("llama3", 2.0), "original_max_position_embeddings"),
        (("linear", 0.5), "at least 1"),
        (("llama3", 2.0, 64, 4.0, 1.0), "more than low_freq_factor"),
    ],
)
def test_a_rope_scaling_refuses_what_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        RopeScaling(*options)


def test_replacing_a_size_moves_what_depends_on_it():
    config = replace(ModelConfig(**SMALL), hidden_size=96)
    assert config.resolved().head_dim == 16 and config.resolved().intermediate_size == 256
    assert not config.differences(config.resolved())
    assert config.differences(replace(config, norm_eps=1e-6)) == {"norm_eps": (1e-5, 1e-6)}


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'llama-3.1-8b'"):
        preset("llama3.1-8b")
    assert set(FAMILIES) <= set(PRESETS)


# Running.


def test_inputs_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ValueError, match="decoder_input_ids"):
        TransformerModel(small("t5-small"))(IDS)
    with pytest.raises(ValueError, match="decoder_input_ids given to a model without an encoder"):
        TransformerModel(small())(IDS, decoder_input_ids=IDS)
    with pytest.raises(ValueError, match="19 positions, and only 16 are learned"):
        TransformerModel(small("gpt2", max_position_embeddings=16))(IDS)
    with pytest.raises(ValueError, match="without segment embeddings"):
        TransformerModel(small())(IDS, token_type_ids=IDS)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("t5-small", "t5-v1.1-base")])
def test_chapter_01s_loop_trains_it_unchanged(name):
    """Bidirectional models see the targets, so theirs falls as well."""
    model = TransformerModel(small(name, hidden_dropout=0.0, attention_dropout=0.0))
    batch = {"input_ids": IDS[:, :-1], "targets": IDS[:, 1:]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = [totals.mean_loss for _, totals in train(model, optimizer, [[batch]] * 30, next_token_objective, steps=30)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(97.0)).item(), abs=0.3)
    assert losses[-1] < 1.0


@by_family
def test_float64_stays_float64_and_autocast_works(name):
    model = TransformerModel(small(name)).eval()
    given = {"decoder_input_ids": IDS[:, :7]} if name.startswith("t5") else {}
    expected = model(IDS, **given)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(IDS, **given)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.03 * expected.abs().max().item())
    wide = model.double()(IDS, **given)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected, rtol=0, atol=1e-6)


def test_dropout_acts_in_training_only():
    model = TransformerModel(small("gpt2", num_key_value_heads=None))
    assert not torch.equal(model.train()(IDS), model(IDS))
    assert torch.equal(model.eval()(IDS), model(IDS))
