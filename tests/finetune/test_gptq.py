"""GPTQ: against exact conditional least squares, on a model's layers in order, and what is refused."""

import copy

import pytest
import torch

from shared.finetune.quantization.calibration import blocks_with_inputs, shared_inputs, watch
from shared.finetune.quantization.gptq import GPTQ, Hessian, blocks, output_error, quantize_gptq
from shared.finetune.quantization.methods import layers_of, quantize_model
from shared.finetune.quantization.rounding import Rounding, decode, round_to_nearest
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig

TINY = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def inputs_and_weight(columns=96, rows=20, tokens=400):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ mixing
    return x, torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def hessian_of(x):
    hessian = Hessian(x.shape[1], torch.float64)
    for part in x.split(150):
        hessian.add(part)
    return hessian.value()


def exact_gptq(weight, hessian, rounding, damping, order):
    """Conditional least squares: after each column, the rest is solved for again, in full. Scales of a group are taken when it begins; in
    another order than the columns' own, all from the weights as they were."""
    columns = weight.shape[1]
    width = rounding.columns(columns)
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype)
    current, result, done, scales = weight.clone(), torch.zeros_like(weight), [], {}
    in_order = order == list(range(columns))
    for column in order:
        group, rest = column // width, [other for other in order if other not in done and other != column]
        if in_order and column % width == 0:
            scales[group] = rounding.scales(current[:, column : column + width])
        elif not in_order:
            scales[group] = rounding.scales(weight[:, group * width : (group + 1) * width])
        result[:, column] = decode(rounding.encode(current[:, column], *scales[group]), *scales[group])
        done.append(column)
        if rest:
            error = (weight - result)[:, done]
            moved = torch.linalg.solve(hessian[rest][:, rest], hessian[rest][:, done] @ error.T).T
            current[:, rest] = weight[:, rest] + moved
    return result


@pytest.mark.parametrize("block", [1, 7, 32, 40, 128])
@pytest.mark.parametrize(("group", "symmetric"), [(None, True), (32, False), (48, True)])
def test_gptq_is_conditional_least_squares_with_any_block(block, group, symmetric):
    x, weight = inputs_and_weight()
    rounding = Rounding(4, group, symmetric, kept_in=torch.float64)
    wanted = exact_gptq(weight, hessian_of(x), rounding, 0.01, list(range(96)))
    ours = quantize_gptq(weight, hessian_of(x), GPTQ(rounding, block=block))
    torch.testing.assert_close(ours.values(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("group", [None, 32])
def test_act_order_takes_the_largest_inputs_first(group):
    x, weight = inputs_and_weight()
    rounding, hessian = Rounding(3, group, kept_in=torch.float64), hessian_of(x)
    order = hessian.diagonal().argsort(descending=True).tolist()
    assert order != list(range(96))
    wanted = exact_gptq(weight, hessian, rounding, 0.05, order)
    ours = quantize_gptq(weight, hessian, GPTQ(rounding, damping=0.05, act_order=True, block=16))
    torch.testing.assert_close(ours.values(), wanted, rtol=0, atol=1e-9)


def test_the_hessian_is_that_of_the_squared_error():
    x, weight = inputs_and_weight()
    weight = weight[:1].clone().requires_grad_()
    loss = (x @ weight[0]).square().mean()
    [gradient] = torch.autograd.grad(loss, weight, create_graph=True)
    rows = torch.stack([torch.autograd.grad(gradient[0, column], weight, retain_graph=True)[0][0] for column in range(0, 96, 19)])
    torch.testing.assert_close(hessian_of(x)[::19], rows)


def test_the_error_is_below_rounding_to_nearest_on_the_calibration_inputs():
    x, weight = inputs_and_weight()
    hessian = hessian_of(x)
    for bits in (3, 4):
        rounding = Rounding(bits, 32)
        plain = output_error(round_to_nearest(weight, rounding).values() - weight, weight, hessian)
        for act_order in (False, True):
            change = quantize_gptq(weight, hessian, GPTQ(rounding, act_order=act_order)).values() - weight
            assert output_error(change, weight, hessian) < 0.8 * plain
            assert output_error(change, weight, hessian) == pytest.approx(((x @ change.T).norm() / (x @ weight.T).norm()).item() ** 2)


def test_dead_columns_become_zero_and_change_nothing_else():
    x, weight = inputs_and_weight()
    dead = [3, 50]
    x[:, dead] = 0
    settings = GPTQ(Rounding(4, None, kept_in=torch.float64), damping=0.0)
    ours = quantize_gptq(weight, hessian_of(x), settings).values()
    assert not ours[:, dead].any()
    kept = [column for column in range(96) if column not in dead]
    alone = quantize_gptq(weight[:, kept], hessian_of(x)[kept][:, kept], settings).values()
    torch.testing.assert_close(ours[:, kept], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("columns", "block", "width"), [(96, 128, 32), (96, 40, 32), (96, 7, 96), (96, 7, 32), (64, 16, 64), (64, 1, 1)])
def test_a_group_lies_within_a_block_or_begins_with_one(columns, block, width):
    cut = blocks(columns, block, width)
    assert [start for start, _ in cut[1:]] == [stop for _, stop in cut[:-1]] and cut[0][0] == 0 and cut[-1][1] == columns
    assert all(stop - start <= block for start, stop in cut)
    for first in range(0, columns, width):
        assert any(start <= first and (first + width <= stop or start == first) for start, stop in cut)


@pytest.mark.parametrize(
    ("hessian", "damping", "says"),
    [
        (torch.zeros(32, 32), 0.01, "The Hessian of blocks.0.q_proj is zero"),
        (torch.full((32, 32), torch.inf), 0.01, "blocks.0.q_proj is not finite"),
        (torch.ones(32, 32), 0.0, "blocks.0.q_proj cannot be factorised"),
    ],
)
def test_a_hessian_that_says_nothing_is_refused_by_name(hessian, damping, says):
    with pytest.raises(ValueError, match=says):
        quantize_gptq(torch.ones(4, 32), hessian, GPTQ(Rounding(4, 32), damping=damping), "blocks.0.q_proj")


# A whole model


@pytest.fixture(scope="module")
def model():
    return TransformerModel(ModelConfig(**TINY, initializer_range=0.1), seed=0)


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [packed_batch(generator) for _ in range(3)]


def packed_batch(generator):
    """Two rows of 24: two documents each, and padding in the second."""
    ids = torch.randint(61, (2, 24), generator=generator)
    documents = torch.tensor([[0] * 10 + [1] * 14, [0] * 8 + [1] * 6 + [-1] * 10])
    positions = torch.tensor([[*range(10), *range(14)], [*range(8), *range(6), *[0] * 10]])
    return {"input_ids": ids.where(documents >= 0, 0), "documents": documents, "positions": positions, "targets": ids}


def inputs_of(model, batches, name):
    """The inputs of a layer in an ordinary forward pass, without padding."""
    from shared.model.chunked_loss import apart

    found, model = [], copy.deepcopy(model).eval()
    model.get_submodule(name).register_forward_pre_hook(lambda _, arguments: found.append(arguments[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch["input_ids"], **apart(batch))
    return torch.cat([x[batch["documents"] >= 0] for x, batch in zip(found, batches, strict=True)])


def test_blocks_get_the_inputs_that_a_forward_pass_gives_them(model, batches):
    for name, block, inputs in blocks_with_inputs(model, batches):
        for group in shared_inputs(block, name):
            seen = []
            watch(block, inputs, group.layers[0], lambda arguments, kept, seen=seen: seen.append(arguments[0][kept]))
            torch.testing.assert_close(torch.cat(seen), inputs_of(model, batches, f"{name}.{group.layers[0]}"), rtol=0, atol=1e-6)
    assert model.training  # as it was found


def test_a_watched_block_runs_no_further_than_the_layer(model, batches):
    _, block, inputs = next(blocks_with_inputs(model, batches))
    called, layers = [], [layer for group in shared_inputs(block, "0") for layer in group.layers]
    hooks = [block.get_submodule(layer).register_forward_hook(lambda *_, layer=layer: called.append(layer)) for layer in layers]
    try:
        watch(block, inputs, "attention.o_proj", lambda arguments, kept: None)
    finally:
        for hook in hooks:
            hook.remove()
    assert called == ["attention.q_proj", "attention.k_proj", "attention.v_proj"] * len(batches)


def test_each_layer_sees_the_quantized_layers_before_it(model, batches):
    """The last layer of the quantized model is what GPTQ makes of its float weight and of its inputs in the quantized model."""
    settings, quantized = GPTQ(Rounding(4, 32)), copy.deepcopy(model)
    reports = list(quantize_model(quantized, batches, settings))
    assert len(reports) == layers_of(model) == 14
    name = "stack.blocks.1.feed_forward.down_proj"
    x = inputs_of(quantized, batches, name)
    hessian, weight = Hessian(96), model.get_submodule(name).weight.detach()
    hessian.add(x)
    wanted = quantize_gptq(weight, hessian.value(), settings).values()
    torch.testing.assert_close(quantized.get_submodule(name).dequantized(), wanted, rtol=0, atol=1e-6)
    float_inputs = inputs_of(model, batches, name)
    assert (x - float_inputs).norm() > 0.01 * float_inputs.norm()
    assert sum(report.error for report in reports) < 0.8 * sum(report.rounded for report in reports)


def test_rounding_alone_needs_no_more_than_a_walk(model, batches):
    quantized = copy.deepcopy(model)
    assert all(report.error == report.rounded > 0 for report in quantize_model(quantized, batches, Rounding(8, None)))
    ids = batches[0]["input_ids"]
    torch.testing.assert_close(quantized(ids), model(ids), rtol=0, atol=0.1)


def test_a_model_whose_text_does_not_reach_a_layer_is_refused_by_name(model, batches):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.stack.blocks["1"].feed_forward_norm.weight.zero_()
    with pytest.raises(ValueError, match="The Hessian of stack.blocks.1.feed_forward.gate_proj is zero"):
        list(quantize_model(broken, batches, GPTQ(Rounding(4, 32))))


def test_experts_groups_and_empty_text_are_refused_before_any_work(model, batches):
    experts = MixtureConfig(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32)
    mixture = TransformerModel(MixtureModelConfig(**TINY, experts=experts), MIXTURE)
    with pytest.raises(ValueError, match="stack.blocks.0.feed_forward is of the kind Mixture"):
        list(quantize_model(mixture, batches, GPTQ(Rounding(4, 32))))
    with pytest.raises(ValueError, match="stack.blocks.0.feed_forward.down_proj: .*groups of 64"):
        list(quantize_model(copy.deepcopy(model), batches, Rounding(4, 64)))
    with pytest.raises(ValueError, match="no calibration text"):
        list(quantize_model(copy.deepcopy(model), [], Rounding(4, 32)))
    for changes, says in (({"damping": -1.0}, "damping is -1.0"), ({"block": 0}, "block is 0")):
        with pytest.raises(ValueError, match=says):
            GPTQ(**changes)
