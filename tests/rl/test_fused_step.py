"""The fused decoding step computes what the model's own pass computes, and is taken for plain models alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.preference.value_head import with_value_head
from shared.rl.decoding_cache import DecodingCache
from shared.rl.fused_step import FusedStep

CONFIG = ModelConfig(
    vocab_size=53, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40,
    max_position_embeddings=32, initializer_range=0.3,
)  # fmt: skip
GPT2 = replace(
    CONFIG, position="learned", norm="layer_norm", hidden_act="gelu_tanh", gated=False, attention_bias=True, attention_output_bias=True,
    mlp_bias=True, tie_word_embeddings=True,
)  # fmt: skip
PLAIN = {
    "LLaMA": CONFIG, "GPT-2": GPT2, "ALiBi": replace(CONFIG, position="alibi"), "T5's positions": replace(CONFIG, position="relative"),
    "none": replace(CONFIG, position="none", logit_scale=0.5, embedding_norm=True),
    "biases": replace(CONFIG, attention_bias=True, mlp_bias=True),
    "window": replace(CONFIG, sliding_window=3, layer_types=("sliding_attention", "full_attention", "sliding_attention")),
}  # fmt: skip


def model_of(config: ModelConfig, dtype=torch.float64, **more) -> TransformerModel:
    model = TransformerModel(config, seed=1, **more).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:  # at 0 and 1 they would hide mistakes
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", PLAIN)
def test_it_computes_what_the_model_computes(name, dtype, tolerance):
    """Tables of RoPE are float32 in both: the tolerance in float64 is theirs."""
    model = model_of(PLAIN[name], dtype)
    fused, own = (DecodingCache(model, 3, 20) for _ in range(2))
    assert fused.fused is not None
    own.fused = None
    with torch.no_grad():
        for cache in (fused, own):
            cache.read([[4, 1, 2], [7], [9, 9, 9, 30, 2, 4]])
        for tokens in ([3, 3, 8], [50, 2, 1], [0, 0, 6], [11, 12, 13]):
            expected = own.step(tokens)
            torch.testing.assert_close(fused.step(tokens), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    for mine, theirs in zip(fused.kept.values(), own.kept.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * 10)


def hooked(kind: str, where: str) -> TransformerModel:
    model = model_of(CONFIG)
    getattr(model.get_submodule(where), f"register_forward_{kind}")(lambda *_: None)
    return model


def with_other_linear() -> TransformerModel:
    model = model_of(CONFIG)
    model.stack.blocks["1"].attention.o_proj = nn.Sequential(nn.Linear(48, 48))
    return model.double()


OTHERS = {
    "norms of queries": lambda: model_of(replace(CONFIG, qk_norm=True)),
    "experts": lambda: model_of(
        replace(CONFIG, experts=MixtureConfig(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)), builders=MIXTURE
    ),
    "post-norm": lambda: model_of(replace(CONFIG, norm_position="post")),
    "encoder-decoder": lambda: model_of(replace(CONFIG, architecture="encoder-decoder", position="relative")),
    "hook": lambda: hooked("hook", "stack.blocks.0.attention.q_proj"),
    "pre-hook": lambda: hooked("pre_hook", ""),
    "adapter": with_other_linear,
    "wrapper": lambda: nn.Sequential(model_of(CONFIG)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_models_have_passes_of_their_own(other):
    assert not FusedStep.fits(other())


def test_a_policy_with_a_value_head_is_plain_and_autocast_is_not():
    model = with_value_head(model_of(CONFIG))
    assert FusedStep.fits(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not FusedStep.fits(model)
