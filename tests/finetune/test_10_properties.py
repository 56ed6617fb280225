"""The sentences of chapter 10's contracts, one by one, on tensors and chats that hypothesis makes up; and libraries' own answers."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.course import catalogue, running
from shared.finetune.chat.masking import assistant_mask
from shared.finetune.lora import lora_linear, merge_lora
from shared.finetune.lora_parallel import FactorPlan, lora_sharding
from shared.finetune.quantization.awq import awq_scales
from shared.finetune.quantization.gptq import gptq_column
from shared.finetune.quantization.nf4 import dequantize_nf4, quantize_nf4

often = settings(max_examples=40)
SEEDS = st.integers(0, 10**6)
LOSSES = st.sampled_from([0.0, 1.0, 2.0, 2.0 + 1e-12, math.inf, math.nan])


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def chats(draw) -> tuple[list, list]:
    """Tokens in the order of the text, of which some have no text, at (0, 0) or in place, and some are pieces of one character."""
    offsets, place = [], 0
    for length in draw(st.lists(st.integers(0, 5), max_size=12)):
        kind = draw(st.sampled_from(["text", "text", "text", "nowhere", "pieces"]))
        offsets += [(0, 0)] if kind == "nowhere" else [(place, place + 1)] * 3 if kind == "pieces" else [(place, place + length)]
        place = max(place, offsets[-1][1])
    ends = sorted(draw(st.lists(st.integers(0, place + 1), max_size=6)))
    return offsets, list(zip(ends[::2], ends[1::2], strict=False))


@often
@given(chat=chats())
def test_a_token_is_trained_if_it_has_a_character_of_an_answer_whatever_else_it_has(chat):
    offsets, answers = chat
    mask = assistant_mask(offsets, answers)
    assert mask.dtype == torch.bool and mask.shape == (len(offsets),)
    for (start, stop), trained in zip(offsets, mask.tolist(), strict=True):
        assert trained == any(first <= character < last for character in range(start, stop) for first, last in answers)
    assert not any(trained for (start, stop), trained in zip(offsets, mask.tolist(), strict=True) if start == stop)


@st.composite
def layers(draw) -> dict:
    size, out, r = (draw(st.integers(1, 5)) for _ in range(3))
    seed, leading = draw(SEEDS), draw(st.lists(st.integers(0, 3), max_size=2))
    return {
        "x": randn(*leading, size, seed=seed), "weight": randn(out, size, seed=seed + 1),
        "bias": randn(out, seed=seed + 2) if draw(st.booleans()) else None, "lora_A": randn(r, size, seed=seed + 3),
        "lora_B": randn(out, r, seed=seed + 4), "scaling": draw(st.sampled_from([0.0, 0.5, 2.0, -1.0])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),
    }  # fmt: skip


@often
@given(layer=layers(), seed=SEEDS)
def test_lora_is_the_layer_with_the_merged_weight_and_drops_what_torchs_dropout_drops(layer, seed):
    before = {name: value.clone() for name, value in layer.items() if isinstance(value, Tensor)}
    torch.manual_seed(seed)
    found = lora_linear(**layer)
    torch.manual_seed(seed)
    kept = F.dropout(layer["x"], layer["dropout"]) if layer["dropout"] else layer["x"]
    after = torch.rand(1)
    merged = merge_lora(torch.zeros_like(layer["weight"]), layer["lora_A"], layer["lora_B"], layer["scaling"])
    expected = F.linear(layer["x"], layer["weight"], layer["bias"]) + F.linear(kept, merged)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.manual_seed(seed)
    lora_linear(**layer)
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(layer[name], value) for name, value in before.items())


@often
@given(layer=layers())
def test_gradients_flow_to_x_the_factors_and_the_bias_and_to_the_weight_none(layer):
    leaves = {name: layer[name].requires_grad_() for name in ("x", "lora_A", "lora_B", "bias") if layer[name] is not None}
    found = lora_linear(**layer | {"dropout": 0.0})
    found.backward(torch.ones_like(found))
    assert layer["weight"].grad is None and all(leaf.grad is not None for leaf in leaves.values())
    flow = torch.ones_like(found)
    update = layer["scaling"] * flow.reshape(-1, flow.shape[-1]).T @ (layer["x"].detach().reshape(-1, layer["x"].shape[-1]))
    torch.testing.assert_close(layer["lora_A"].grad, layer["lora_B"].detach().T @ update, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer["lora_B"].grad, update @ layer["lora_A"].detach().T, rtol=1e-10, atol=1e-12)


@often
@given(seed=SEEDS, kinds=st.tuples(*[st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])] * 2),
       stack=st.lists(st.integers(1, 3), max_size=2))
def test_a_merge_is_a_new_tensor_of_the_weights_dtype_rounded_once(seed, kinds, stack):
    draw = lambda *shape, seed: torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(seed)) / 16  # noqa: E731
    weight, a, b = draw(*stack, 4, 5, seed=seed).to(kinds[0]), draw(*stack, 3, 5, seed=seed + 1), draw(*stack, 4, 3, seed=seed + 2)
    found = merge_lora(weight, a.to(kinds[1]), b.to(kinds[1]), 0.25)
    exact = weight.double() + 0.25 * torch.einsum("...or,...ri->...oi", b.double(), a.double())
    assert found.dtype == weight.dtype and torch.equal(found, exact.to(weight.dtype))
    assert found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
    again = merge_lora(exact, a, b, -0.25)
    torch.testing.assert_close(again, weight.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [None, 0, 1])
def test_a_factor_is_cut_with_the_weights_dimension_and_the_other_ones_gradient_is_summed(cut):
    a, b = lora_sharding(cut)
    assert (a.cut, b.cut) == (1 if cut == 1 else None, 0 if cut == 0 else None)
    assert all(type(plan) is FactorPlan and type(plan.summed) is bool for plan in (a, b))
    assert all(plan.summed == (cut is not None and plan.cut is None) for plan in (a, b))


NEAR_NF4 = torch.cat([torch.linspace(-1, 0, 8), torch.linspace(0, 1, 9)[1:]])


@st.composite
def weights(draw) -> tuple[Tensor, int]:
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    scale = draw(st.sampled_from([1.0, 1e-30, 1e-42, 1e30, 0.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64] if scale != 1.0 else [torch.float32, torch.bfloat16, torch.float16]))
    weight = (randn(*shape, seed=draw(SEEDS)) * scale).to(dtype)
    return (weight.mT if draw(st.booleans()) and weight.dim() > 1 else weight), draw(st.integers(1, 9))


@often
@given(made=weights(), values=st.sampled_from(["near", "drawn"]), seed=SEEDS)
def test_each_number_becomes_its_nearest_value_times_the_scale_of_its_block(made, values, seed):
    weight, block = made
    inner = torch.linspace(0, 1, 9)[1:-1] if values == "near" else randn(7, seed=seed).sigmoid().sort().values.float()
    table = NEAR_NF4 if values == "near" else torch.cat([torch.tensor([-1.0]), -inner[:6].flip(0), torch.zeros(1), inner, torch.ones(1)])
    codes, scales = quantize_nf4(weight, table, block)
    flat, n = weight.float().reshape(-1), weight.numel()
    assert codes.dtype == torch.uint8 and codes.shape == ((n + 1) // 2,)
    assert scales.dtype == torch.float32 and scales.shape == (-(-n // block),)
    assert scales.tolist() == [float(part.abs().max()) for part in flat.split(block)] if n else scales.numel() == 0
    if n % 2:
        assert table[int(codes[-1]) % 16] == 0
    back = dequantize_nf4(codes, scales, table, block, tuple(weight.shape), torch.float32)
    each = scales.repeat_interleave(block)[:n]
    normal = each > 1e-37
    quotients = flat[normal].double() / each[normal].double()
    off = (quotients.unsqueeze(1) - table.double()).abs().min(dim=1).values
    found = back.reshape(-1)[normal].double() / each[normal].double()
    assert ((found - quotients).abs() <= off + 1e-6).all()
    assert not back.reshape(-1)[each == 0].any()


@often
@given(made=weights(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_what_was_quantized_and_comes_back_is_quantized_to_the_same_codes(made, dtype):
    weight, block = made
    assume(weight.numel() == 0 or weight.abs().max() > 1e-20 or not weight.any())
    codes, scales = quantize_nf4(weight, NEAR_NF4, block)
    back = dequantize_nf4(codes, scales, NEAR_NF4, block, tuple(weight.shape), torch.float32)
    again, same = quantize_nf4(back, NEAR_NF4, block)
    assert torch.equal(codes, again) and torch.equal(scales, same)
    assert torch.equal(dequantize_nf4(codes, scales, NEAR_NF4, block, tuple(weight.shape), dtype), back.to(dtype))


@often
@given(seed=SEEDS, out=st.integers(1, 4), size=st.integers(1, 6), data=st.data(), part=st.booleans())
def test_a_column_becomes_its_quantized_values_and_only_later_ones_make_up_for_it(seed, out, size, data, part):
    column = data.draw(st.integers(0, size - 1))
    whole = 3 * randn(out, size + 4, seed=seed)
    weights = whole[:, 2 : size + 2] if part else whole[:, 2 : size + 2].clone()
    before, around, called = weights.clone(), whole.clone(), []
    x = randn(3 * size, size, seed=seed + 1)
    factor = torch.linalg.cholesky(torch.linalg.inv(x.T @ x), upper=True)
    error = gptq_column(weights, column, factor, lambda given: called.append(given.clone()) or given.round())
    assert len(called) == 1 and torch.equal(called[0], before[:, column])
    assert torch.equal(weights[:, column], before[:, column].round()) and torch.equal(weights[:, :column], before[:, :column])
    torch.testing.assert_close(error * factor[column, column], before[:, column] - weights[:, column], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(before[:, column + 1 :] - weights[:, column + 1 :], torch.outer(error, factor[column, column + 1 :]))
    around[:, 2 : size + 2] = weights if part else around[:, 2 : size + 2]
    assert torch.equal(whole, around)


@often
@given(means=st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 0.5, 1.0, 7.0, 1e4]), min_size=1, max_size=5),
       tries=st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), LOSSES), max_size=6))
def test_the_first_of_the_scales_with_the_smallest_finite_loss_is_taken_and_each_ratio_is_tried_once_in_order(means, tries):
    given_means, tried = torch.tensor(means), []

    def loss_of(scales: Tensor) -> float:
        tried.append(scales.clone())
        return tries[len(tried) - 1][1]

    losses = [loss for _, loss in tries if math.isfinite(loss)]
    if not losses:
        with pytest.raises(ValueError):
            awq_scales(given_means, loss_of, [ratio for ratio, _ in tries])
        return
    found = awq_scales(given_means, loss_of, [ratio for ratio, _ in tries])
    assert torch.equal(found, tried[[loss for _, loss in tries].index(min(losses))])
    for (ratio, _), scales in zip(tries, tried, strict=True):
        powers = [max(mean**ratio, 1e-4) for mean in means]
        expected = torch.tensor(powers) / math.sqrt(max(powers) * min(powers))
        torch.testing.assert_close(scales, expected, rtol=1e-5, atol=0)
        assert scales.max() * scales.min() == pytest.approx(1, rel=1e-5)


# Libraries' own answers.


def test_codes_and_scales_that_the_checks_keep_are_what_bitsandbytes_makes():
    from bitsandbytes import functional
    data = check_data()
    assert functional.get_4bit_type("nf4", device="cpu").tolist() == data.NF4
    for kind in [*data.SHAPES, "close calls"]:
        weight = data.weights_of(kind)
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
        assert bytes(codes.flatten().tolist()).hex() == data.CODES[kind]
        assert " ".join(float(scale).hex() for scale in state.absmax) == data.SCALES[kind]
        found = dequantize_nf4(codes.flatten(), state.absmax, torch.tensor(data.NF4), 64, tuple(weight.shape), weight.dtype)
        assert torch.equal(found, functional.dequantize_4bit(codes, state))


def check_data():
    """The data of chapter 10's checks, read as they read it."""
    running.read_check(catalogue.find_exercise("10.quantize_nf4"))
    return sys.modules["course_checks_10.nf4_data"]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lora_is_pefts_with_the_same_seed(dropout):
    import peft
    base = torch.nn.Sequential(torch.nn.Linear(7, 5)).double()
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout, target_modules=["0"])
    model = peft.get_peft_model(base, config).double().train()
    layer = model.base_model.model[0]
    factors = [getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B")]
    with torch.no_grad():
        factors[1].copy_(randn(5, 3, seed=2))
    x, plain = randn(11, 7, seed=3), layer.base_layer
    torch.manual_seed(4)
    theirs = model(x)
    torch.manual_seed(4)
    ours = lora_linear(x, plain.weight, plain.bias, *factors, scaling=2.0, dropout=dropout)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    flow = randn(11, 5, seed=5)
    for our, their in zip(torch.autograd.grad(ours, factors, flow), torch.autograd.grad(theirs, factors, flow), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
    merged = merge_lora(plain.weight, *factors, scaling=2.0)
    layer.merge()
    torch.testing.assert_close(merged, layer.base_layer.weight, rtol=1e-12, atol=1e-12)


def test_a_mask_is_that_of_transformers_chat_templates():
    """ChatML with transformers' `{% generation %}`: `return_assistant_tokens_mask`."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"any": 0}, unk_token="any"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\||\|>|\n| ?\w+| ?[^\w\s]+"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "What are 17 and 4?"}, {"role": "assistant", "content": "17 and 4 are 21."},
                {"role": "user", "content": "And 5?"}, {"role": "assistant", "content": "26, says the sum."}]  # fmt: skip
    theirs = tokenizer.apply_chat_template(messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True)
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    spans = [(text.index(m["content"]), text.index(m["content"]) + len(m["content"] + "<|im_end|>")) for m in messages[1::2]]
    mask = assistant_mask(plain.encode(text).offsets, spans)
    assert mask.long().tolist() == theirs["assistant_masks"] and 0 < mask.sum() < len(mask)
