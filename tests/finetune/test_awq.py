"""AWQ: scales against brute force, the fold that changes no output, clipping, and what is refused."""

import copy

import pytest
import torch

from shared.finetune.quantization.awq import AWQ, clip_weights, fold_scales, search_scales
from shared.finetune.quantization.calibration import blocks_with_inputs, shared_inputs
from shared.finetune.quantization.gptq import Hessian, output_error
from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.rounding import Rounding, round_to_nearest
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from tests.finetune.test_gptq import TINY, inputs_of, packed_batch

KINDS = {
    "llama": {},
    "grouped queries, biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "gpt2": {"norm": "layer_norm", "gated": False, "hidden_act": "gelu", "position": "learned", "mlp_bias": True},
    "norm on heads": {"qk_norm": True},
}


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [packed_batch(generator) for _ in range(2)]


def made(**changes):
    """A model in which all numbers differ, some channels' norms by far."""
    model = TransformerModel(ModelConfig(**TINY | {"initializer_range": 0.1} | changes), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(torch.exp(1.5 * torch.randn(parameter.shape, generator=generator)))
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folding_changes_the_weights_and_not_the_model(batches, kind):
    model = made(**KINDS[kind]).double()
    folded, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    number = 0
    for name, block in folded.stack.blocks.items():
        for group in shared_inputs(block, name):
            if group.before is None:
                with pytest.raises(ValueError, match="Nothing before"):
                    fold_scales(block, group, torch.ones(1))
                continue
            channels = block.get_submodule(group.layers[0]).in_features
            fold_scales(block, group, torch.exp(torch.randn(channels, generator=generator)))
            number += 1
    assert number == {"llama": 8, "grouped queries, biases": 6, "gpt2": 6, "norm on heads": 8}[kind]
    for batch in batches:
        torch.testing.assert_close(folded(batch["input_ids"]), model(batch["input_ids"]), rtol=0, atol=1e-6)
    changed = folded.stack.blocks["0"].attention.q_proj.weight
    assert (changed - model.stack.blocks["0"].attention.q_proj.weight).abs().max() > 0.1


def brute_force(model, batches, name, group, rounding):
    """Each ratio tried on a copy of the whole model, whose outputs of `group.within` are compared in a forward pass of all of it."""
    mean = inputs_of(model, batches, f"{name}.{group.layers[0]}").abs().mean(dim=0)
    within = f"{name}.{group.within}"

    def outputs(of):
        from shared.model.chunked_loss import apart

        found = []
        of.get_submodule(within).register_forward_hook(lambda module, given, result: found.append(result))
        with torch.no_grad():
            for batch in batches:
                of(batch["input_ids"], **apart(batch))
        return torch.cat([y[batch["documents"] >= 0] for y, batch in zip(found, batches, strict=True)])

    wanted, losses = outputs(copy.deepcopy(model)), []
    for number in range(20):
        scales = mean.pow(number / 20).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        tried = copy.deepcopy(model)
        for layer in group.layers:
            weight = tried.get_submodule(f"{name}.{layer}").weight
            weight.data = round_to_nearest(weight.data * scales, rounding).values() / scales
        losses.append(((outputs(tried) - wanted).square().mean().item(), scales))
    return min(losses, key=lambda each: each[0])[1], [loss for loss, _ in losses]


def test_scales_are_those_of_a_brute_force_search(batches):
    model, settings = made().eval(), AWQ(Rounding(4, 32, symmetric=False))
    ratios_that_won = set()
    for name, block, inputs in blocks_with_inputs(model, batches):
        for group in shared_inputs(block, name):
            before = copy.deepcopy(block.state_dict())
            ours = search_scales(block, group, inputs, settings, name)
            wanted, losses = brute_force(model, batches, name, group, settings.rounding)
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
            ratios_that_won.add(losses.index(min(losses)))
            assert all(torch.equal(before[key], value) for key, value in block.state_dict().items())
    assert len(ratios_that_won) > 2


def test_awq_beats_rounding_where_some_channels_are_large(batches):
    errors = {}
    for clip in (False, True):
        reports = list(quantize_model(made(), batches, AWQ(Rounding(4, 32, False), clip=clip)))
        errors[clip] = sum(report.error for report in reports)
        assert errors[clip] < 0.6 * sum(report.rounded for report in reports)
    assert errors[True] < errors[False]


def test_clipping_takes_the_best_limit_of_each_group():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(200, 64, generator=generator), torch.randn(6, 64, generator=generator) ** 3
    hessian, rounding = Hessian(64), Rounding(3, 32, symmetric=False, kept_in=torch.float32)
    hessian.add(x)
    ours = clip_weights(weight, hessian.value(), rounding)
    for row in range(6):
        for columns in (slice(0, 32), slice(32, 64)):
            numbers, losses = weight[row : row + 1, columns], []
            limits = [(1 - step / 20) * numbers.abs().max() for step in range(11)]
            for limit in limits:
                rounded = round_to_nearest(numbers.clamp(-limit, limit), rounding).values()
                losses.append(((rounded - numbers) @ x[:, columns].T).square().mean().item())
            best = limits[losses.index(min(losses))]
            torch.testing.assert_close(ours[row, columns], numbers[0].clamp(-best, best))
    assert 0 < (ours != weight).sum() < 24
    errors = [output_error(round_to_nearest(each, rounding).values() - weight, weight, hessian.value()) for each in (ours, weight)]
    assert errors[0] < errors[1]


def test_inputs_of_zeros_and_no_ratios_are_refused(batches):
    model = made()
    with torch.no_grad():
        model.stack.blocks["0"].feed_forward_norm.weight.zero_()
    with pytest.raises(ValueError, match=r"The inputs of stack.blocks.0.feed_forward.gate_proj are all 0"):
        list(quantize_model(model, batches, AWQ(Rounding(4, 32))))
    with pytest.raises(ValueError, match="ratios is 0"):
        AWQ(ratios=0)
