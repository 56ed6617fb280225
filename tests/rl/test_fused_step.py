"""The fused decoding step computes what the model's own pass computes, and is taken for plain models alone."""

import copy
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
from torch import nn

from shared.finetune.adapters import attach_adapter, base_model
from shared.finetune.config import AdapterConfig
from shared.finetune.lora import LowRankUpdate
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.preference.value_head import with_value_head
from shared.rl import decoding_cache, generation
from shared.rl.generation import CachedSampler
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
    "norms of heads": replace(CONFIG, qk_norm=True),
    "norms of queries and keys": replace(CONFIG, qk_norm=True, qk_norm_over="projection"),
    "window": replace(CONFIG, sliding_window=3, layer_types=("sliding_attention", "full_attention", "sliding_attention")),
}  # fmt: skip


def model_of(config: ModelConfig, dtype=torch.float64, seed=1, **more) -> TransformerModel:
    model = TransformerModel(config, seed=seed, **more).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:  # at 0 and 1 they would hide mistakes
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
    return model


def steps_of(cache: DecodingCache) -> torch.Tensor:
    """The logits of four steps behind three prompts, [steps, rows, vocab]."""
    with torch.no_grad():
        cache.read([[4, 1, 2], [7], [9, 9, 9, 30, 2, 4]])
        return torch.stack([cache.step(tokens) for tokens in ([3, 3, 8], [50, 2, 1], [0, 0, 6], [11, 12, 13])])


def both_steps(model: TransformerModel) -> tuple[torch.Tensor, torch.Tensor]:
    """`steps_of` the fused step, and of the model's own passes."""
    fused, own = (DecodingCache(model, 3, 20) for _ in range(2))
    assert fused.fused is not None
    own.fused = None
    return steps_of(fused), steps_of(own)


def adapted(decomposed: bool) -> TransformerModel:
    """A model with an adapter that rests, and one that has an update of every linear layer."""
    model = model_of(CONFIG)
    for name in ("resting", "active"):
        attach_adapter(model, AdapterConfig(rank=3, targets=["all-linear"], decomposed=decomposed, dropout=0.5), name)
    generator = torch.Generator().manual_seed(6)
    for module in model.modules():
        if isinstance(module, LowRankUpdate):
            module.lora_B.data.normal_(generator=generator)
            if decomposed:
                module.magnitude.data.mul_(1.5)
    return model.eval()


@pytest.mark.parametrize("decomposed", [False, True], ids=["LoRA", "DoRA"])
def test_updates_of_active_adapters_are_merged(decomposed):
    model = adapted(decomposed)
    fused, own = both_steps(model)
    torch.testing.assert_close(fused, own, rtol=1e-6, atol=1e-6 * float(own.abs().max()))
    with base_model(model):
        base, expected = both_steps(model)
    torch.testing.assert_close(base, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    assert (fused - base).abs().mean() > 0.1 * base.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "weights too"])
@pytest.mark.parametrize("config", [CONFIG, GPT2, replace(CONFIG, qk_norm=True)], ids=["LLaMA", "GPT-2", "norms of heads"])
def test_in_16_bits_it_is_as_exact_as_the_model(config, dtype):
    """Both are compared with the same weights in float64. Their distances from it differ by the order of rounding: each way in some draws
    of the weights, and by up to a half; on average over eight draws hardly at all."""
    ratios = []
    for seed in range(8):
        model = model_of(config, seed=seed).to(dtype)
        exact = both_steps(copy.deepcopy(model).double())[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            fused, own = both_steps(model)
        assert fused.dtype == own.dtype == torch.bfloat16
        ours, theirs = ((found.double() - exact).norm().item() for found in (fused, own))
        ratios.append(ours / theirs)
    assert 2 / 3 < geometric_mean(ratios) < 3 / 2, ratios


def test_statistics_of_16_bit_rows_are_float32():
    step = FusedStep(model_of(CONFIG).bfloat16(), 20, None)
    rows = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rows.double() / (rows.double().square().mean(dim=-1, keepdim=True) + CONFIG.norm_eps).sqrt()
    torch.testing.assert_close(step.normed(None, rows).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", PLAIN)
def test_it_computes_what_the_model_computes(name, dtype, tolerance):
    """Tables of RoPE are float32 in both: the tolerance in float64 is theirs."""
    model = model_of(PLAIN[name], dtype)
    fused, own = (DecodingCache(model, 3, 20) for _ in range(2))
    assert fused.fused is not None
    own.fused = None
    found, expected = steps_of(fused), steps_of(own)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
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


def with_updated_embedding() -> TransformerModel:
    return attach_adapter(model_of(CONFIG), AdapterConfig(rank=3, targets=["tokens"]))


def in_four_bits() -> TransformerModel:
    model = model_of(replace(CONFIG, hidden_size=64, num_attention_heads=8, intermediate_size=64), torch.float32)
    assert quantize_base(model)
    return model


def with_updates_over_ranks() -> TransformerModel:
    """Whose ranks would each have a part of the input features, as tensor parallelism makes them."""
    model = adapted(False)
    model.stack.blocks["0"].attention.o_proj.combine = lambda partial: partial
    return model


OTHERS = {
    "experts": lambda: model_of(
        replace(CONFIG, experts=MixtureConfig(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)), builders=MIXTURE
    ),
    "post-norm": lambda: model_of(replace(CONFIG, norm_position="post")),
    "encoder-decoder": lambda: model_of(replace(CONFIG, architecture="encoder-decoder", position="relative")),
    "hook": lambda: hooked("hook", "stack.blocks.0.attention.q_proj"),
    "pre-hook": lambda: hooked("pre_hook", ""),
    "other layers": with_other_linear,
    "updates over ranks": with_updates_over_ranks,
    "updates of the embedding": with_updated_embedding,
    "four bits": in_four_bits,
    "wrapper": lambda: nn.Sequential(model_of(CONFIG)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_models_have_passes_of_their_own(other):
    assert not FusedStep.fits(other())


def test_a_policy_with_a_value_head_is_plain():
    assert FusedStep.fits(with_value_head(model_of(CONFIG)))


def test_weights_are_copied_where_they_have_room(monkeypatch):
    """Asked for, refused, or left to the free memory; the copies are counted to the last matrix."""
    model = model_of(CONFIG, torch.float32)
    copies = FusedStep(model, 20, None)
    held = [copies.head, *(product for layer in copies.blocks for product in layer[1:])]
    assert FusedStep.copied_bytes(model) == 4 * sum(product.weight.numel() for product in held)
    with torch.autocast("cpu", torch.bfloat16):
        assert FusedStep.copied_bytes(model) == 2 * sum(product.weight.numel() for product in held)
    for free, taken in ((FusedStep.copied_bytes(model) / 0.89, True), (FusedStep.copied_bytes(model) / 0.91, False)):
        monkeypatch.setattr(decoding_cache, "free_memory", lambda device, free=free: free)
        assert [DecodingCache(model, 1, 20, fused=each).fused is not None for each in (None, True, False)] == [taken, True, False]


def test_a_sampler_says_whether_weights_are_copied(monkeypatch):
    asked = []
    monkeypatch.setattr(generation, "DecodingCache", lambda *given: asked.append(given[-1]) or DecodingCache(*given))
    for fused in (None, True, False):
        CachedSampler(2, (), fused=fused)(model_of(CONFIG), [[1]], [0], bool)
    assert asked == [None, True, False]
