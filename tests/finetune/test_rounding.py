"""Rounding to nearest: against torchao, against the definition number by number, and what is refused."""

import math
import warnings

import pytest
import torch
from torch import nn

from shared.finetune.quantization.packed import QuantizedLinear, dynamic_kernel, fused_kernel, use_kernels
from shared.finetune.quantization.rounding import BITS, Rounding, pack, round_to_nearest, unpack


@pytest.fixture(scope="module")
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.quantization as module
        from torchao.quantization import granularity, quant_primitives
    return module, granularity.PerGroup, quant_primitives.MappingType


def quantized_by(torchao, config, weight):
    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    layer[0].weight.data.copy_(weight)
    torchao[0].quantize_(layer, config)
    return layer[0]


@pytest.fixture
def weight():
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_groups_are_torchaos(torchao, weight, symmetric, group):
    module, per_group, mapping = torchao
    kind = mapping.SYMMETRIC if symmetric else mapping.ASYMMETRIC
    theirs = quantized_by(torchao, module.IntxWeightOnlyConfig(torch.int4, per_group(group), kind), weight).weight
    ours = round_to_nearest(weight, Rounding(4, group, symmetric, kept_in=torch.float32))
    torch.testing.assert_close(ours.codes.int() - 8, theirs.qdata.int(), rtol=0, atol=0)
    torch.testing.assert_close(ours.scales, theirs.scale.view_as(ours.scales), rtol=0, atol=0)
    torch.testing.assert_close(ours.values(), theirs.dequantize(), rtol=0, atol=0)


def test_int8_rows_are_torchaos(torchao, weight):
    theirs = quantized_by(torchao, torchao[0].Int8WeightOnlyConfig(), weight).weight
    ours = round_to_nearest(weight, Rounding(8, None, kept_in=torch.float32))
    torch.testing.assert_close(ours.codes.int() - 128, theirs.qdata.int(), rtol=0, atol=0)
    torch.testing.assert_close(ours.values(), theirs.dequantize(), rtol=0, atol=0)


def test_int8_with_activations_by_row_is_torchaos(torchao, weight):
    """The integer products are the same numbers, so the outputs are equal up to the order of two multiplications."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1.0], [1.0], [40.0], [1.0], [1.0], [1.0]])
    theirs = quantized_by(torchao, torchao[0].Int8DynamicActivationInt8WeightConfig(), weight)(x)
    rounding = Rounding(8, None, kept_in=torch.float32)
    layer = QuantizedLinear.of(round_to_nearest(weight, rounding), None, rounding)
    assert use_kernels(nn.ModuleList([layer]), dynamic_kernel) == 1
    torch.testing.assert_close(layer(x), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(2, 4, True), (3, 8, False), (4, None, True), (4, 8, False), (8, None, True)])
def test_codes_are_those_of_the_definition(bits, group, symmetric):
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight[1, :8] = 0
    weight[2] = weight[2].abs() + 1  # a range that must still hold 0
    ours = round_to_nearest(weight, Rounding(bits, group, symmetric, kept_in=torch.float64))
    width, last = group or 16, 2**bits - 1
    for row in range(3):
        for start in range(0, 16, width):
            numbers = weight[row, start : start + width].tolist()
            low, high = min(0, *numbers), max(0, *numbers)
            if symmetric:
                high = max(-low, high)
                low = -high
            scale = (high - low) / last or 1.0
            zero = 2 ** (bits - 1) if symmetric else min(max(round(-low / scale), 0), last)
            for column, number in enumerate(numbers, start=start):
                code = min(max(math.floor(number / scale + 0.5) + zero, 0), last)
                assert abs(int(ours.codes[row, column]) - code) <= (abs(number / scale % 1 - 0.5) < 1e-9)
                assert ours.values()[row, column].item() == pytest.approx((int(ours.codes[row, column]) - zero) * scale, abs=1e-12)


def test_zeros_stay_zeros_and_scales_are_what_a_file_holds(weight):
    weight[:, :32] = 0
    for symmetric in (True, False):
        ours = round_to_nearest(weight, Rounding(4, 32, symmetric))
        assert not ours.values()[:, :32].any()
        assert torch.equal(ours.scales, ours.scales.half().float())


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_a_stream_of_bits(bits):
    codes = torch.randint(2**bits, (5, 96), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.shape == (5, 3, bits) and torch.equal(unpack(words, bits), codes)
    for row in range(5):
        stream = sum(int(code) << (bits * place) for place, code in enumerate(codes[row, :32]))
        held = sum((int(word) % 2**32) << (32 * place) for place, word in enumerate(words[row, 0]))
        assert stream == held


@pytest.mark.parametrize(
    ("bits", "group", "make"), [(4, 32, fused_kernel), (4, 128, fused_kernel), (8, None, fused_kernel), (8, None, dynamic_kernel)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_kernels_compute_what_the_reference_path_does(weight, bits, group, make, symmetric):
    if bits == 8 and not symmetric:
        rounding = Rounding(8, None, False)
        assert make(QuantizedLinear.of(round_to_nearest(weight, rounding), None, rounding)) is None
        return
    rounding = Rounding(bits, group, symmetric)
    layer = QuantizedLinear.of(round_to_nearest(weight, rounding), nn.Parameter(torch.randn(64)), rounding)
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(3))
    wanted = layer(x)
    assert use_kernels(layer, make) == 1
    difference = (layer(x) - wanted).norm() / wanted.norm()
    assert 0 < difference < (0.02 if make is dynamic_kernel else 0.01)  # activations in 8 bits; products in bfloat16
    use_kernels(layer, None)
    assert torch.equal(layer(x), wanted)


def test_a_kernel_steps_aside_where_a_gradient_is_asked_for(weight):
    rounding = Rounding(8, None)
    layer = QuantizedLinear.of(round_to_nearest(weight, rounding), None, rounding)
    use_kernels(layer, dynamic_kernel)
    x = torch.randn(3, 256, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(dim=0).expand(3, -1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rounding(5), "bits is 5: give one of 2, 3, 4, 8"),
        (lambda: Rounding(4, 0), "group is 0: give at least 1"),
        (lambda: round_to_nearest(torch.ones(2, 48), Rounding(4, 32)), "Groups of 32 do not divide 48 columns"),
        (lambda: round_to_nearest(torch.full((2, 32), torch.nan), Rounding(4, 32)), "not finite"),
        (lambda: round_to_nearest(torch.full((2, 32), 1e9), Rounding(4, 32)), "no finite scale in torch.float16"),
        (lambda: QuantizedLinear(8, 48, None, Rounding(4, 16)), "must be a multiple of the group and of 32"),
    ],
)
def test_what_cannot_be_quantized_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
