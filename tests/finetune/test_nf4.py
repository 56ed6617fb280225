"""NF4 and double quantization against bitsandbytes, bit for bit, and where its kernel for CPUs rounds another way."""

import pytest
import torch
from torch import Tensor

from shared.finetune.quantization.nf4 import (
    BLOCK,
    decode_scales,
    dequantize_nf4,
    dynamic_values,
    encode_scales,
    nf4_values,
    quantize_nf4,
    scale_blocks,
)


@pytest.fixture(scope="module")
def theirs():
    from bitsandbytes import functional

    with torch.compiler.set_stance("force_eager"):  # it compiles what its kernels do not cover, which takes half a minute
        yield functional


def quantize_theirs(theirs, weight: Tensor, double: bool = False):
    codes, state = theirs.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=double)
    return codes.view(-1), state


def ours(weight: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_nf4(weight, nf4_values(), BLOCK)


def test_both_tables_of_values_equal_theirs_bit_for_bit(theirs):
    assert nf4_values().equal(theirs.get_4bit_type("nf4", "cpu"))
    assert dynamic_values().equal(theirs.create_dynamic_map())


@pytest.mark.parametrize("shape", [(640, 64), (1,), (63,), (64,), (65,), (7, 9), (3, 5, 128), (1000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_equal_theirs_and_numbers_come_back_equal(theirs, shape, dtype):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02).to(dtype)
    (codes, scales), (their_codes, state) = ours(weight), quantize_theirs(theirs, weight)
    assert codes.equal(their_codes) and scales.equal(state.absmax)
    back = dequantize_nf4(codes, scales, nf4_values(), BLOCK, shape, dtype)
    assert back.equal(theirs.dequantize_4bit(their_codes.unsqueeze(1), state).view(shape))


def test_blocks_of_zeros_and_of_the_smallest_and_largest_numbers_equal_theirs(theirs):
    blocks = torch.randn(6, BLOCK, generator=torch.Generator().manual_seed(0))
    weight = blocks * torch.tensor([0.0, 1e-45, 1e-39, 1e-38, 1e-30, 1e38]).unsqueeze(1)
    (codes, scales), (their_codes, state) = ours(weight), quantize_theirs(theirs, weight)
    assert codes.equal(their_codes) and scales.equal(state.absmax)
    assert dequantize_nf4(codes, scales, nf4_values(), BLOCK, weight.shape, torch.float32)[0].count_nonzero() == 0


def on_borders(factor: float = 1.0) -> Tensor:
    """A block that holds every border between two values."""
    values = nf4_values()
    weight = torch.zeros(1, BLOCK)
    weight[0, 0], weight[0, 1:16] = 1, (values[1:] + values[:-1]) / 2
    return weight * factor


def test_a_number_on_a_border_goes_to_the_lower_value_as_theirs_does(theirs):
    weight = torch.cat([on_borders(), on_borders(2.0), on_borders(-0.5)])
    assert ours(weight)[0].equal(quantize_theirs(theirs, weight)[0])
    assert ours(on_borders())[0].tolist()[:8] == [15 << 4 | 0, *(a << 4 | a + 1 for a in range(1, 15, 2))]


def near_borders() -> Tensor:
    """Blocks with a number that a division by the scale, and a product with its reciprocal, take to different sides of a border."""
    values, generator = nf4_values(), torch.Generator().manual_seed(0)
    border = ((values[1:] + values[:-1]) / 2)[11]
    scales = torch.rand(100_000, generator=generator) + 0.5
    numbers = scales * border
    differ = (numbers / scales <= border) != (numbers * (1 / scales) <= border)
    blocks = torch.zeros(int(differ.sum()), BLOCK)
    blocks[:, 0], blocks[:, 1] = scales[differ], numbers[differ]
    return blocks


def test_a_product_with_the_reciprocal_is_what_they_compute_and_not_a_division(theirs):
    blocks = near_borders()
    assert len(blocks) > 1000
    assert ours(blocks)[0].equal(quantize_theirs(theirs, blocks)[0])


def test_their_kernel_for_cpus_divides_in_a_short_last_block_and_so_codes_it_in_another_way_than_the_same_block_filled_up(theirs):
    short = next(block[:62] for block in near_borders())
    filled = torch.cat([short, torch.zeros(2)])
    assert ours(short)[0].equal(ours(filled)[0][:31])
    assert quantize_theirs(theirs, filled)[0][:31].equal(ours(short)[0])
    assert not quantize_theirs(theirs, short)[0].equal(ours(short)[0])


# Double quantization.


@pytest.mark.parametrize("blocks", [256, 512, 300, 1, 5000])
def test_statistics_equal_theirs_and_their_codes_stand_for_the_same_scales(theirs, blocks):
    weight = torch.randn(blocks, BLOCK, generator=torch.Generator().manual_seed(blocks)) * 0.02
    codes, state = quantize_theirs(theirs, weight, double=True)
    mine, scales = ours(weight)
    statistics, numbers = scale_blocks(scales), torch.arange(blocks)
    assert statistics.mean.equal(state.offset.view(1)) and statistics.scales.equal(state.state2.absmax) and mine.equal(codes)
    decoded = decode_scales(state.absmax, numbers, statistics)
    assert decoded.equal(theirs.dequantize_blockwise(state.absmax, state.state2) + state.offset)
    back = dequantize_nf4(codes, decoded, nf4_values(), BLOCK, weight.shape, torch.float32)
    assert back.equal(theirs.dequantize_4bit(codes.unsqueeze(1), state))


def test_their_kernel_for_cpus_rounds_scales_to_65536_steps_first_and_with_that_rounding_the_codes_are_equal(theirs):
    weight = torch.randn(50_000, BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02
    their_codes, scales, numbers = quantize_theirs(theirs, weight, double=True)[1].absmax, ours(weight)[1], torch.arange(50_000)
    statistics = scale_blocks(scales)
    mine = encode_scales(scales, numbers, statistics)
    within = statistics.scales[numbers // 256]
    steps = ((scales - statistics.mean) * (1 / within) + 1) * 0.5 * 65535 + 0.5
    rounded = -1 + 2 * steps.floor() / 65535
    values = dynamic_values()
    assert torch.bucketize(rounded, (values[1:] + values[:-1]) / 2).to(torch.uint8).equal(their_codes)
    assert 0 < (mine != their_codes).sum() < 50_000 * 0.005
    error = (decode_scales(mine, numbers, statistics) - scales).abs()
    assert (error <= (decode_scales(their_codes, numbers, statistics) - scales).abs() + 1e-9).all()


def test_the_codes_of_part_of_a_matrix_are_those_of_the_whole():
    scales = torch.rand(12, 64, generator=torch.Generator().manual_seed(0))
    numbers, statistics = torch.arange(12 * 64).view(12, 64), scale_blocks(scales.view(-1))
    whole = encode_scales(scales, numbers, statistics)
    assert encode_scales(scales[5:9, 3:40], numbers[5:9, 3:40], statistics).equal(whole[5:9, 3:40])
    assert decode_scales(whole[5:9, 3:40], numbers[5:9, 3:40], statistics).equal(decode_scales(whole, numbers, statistics)[5:9, 3:40])
