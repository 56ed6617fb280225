"""Check of 10.quantize_nf4. Oracle: codes and scales that bitsandbytes 0.50.2 made of random weights (tests/finetune/test_10_properties.py
makes them anew and compares); for settings that it does not have, number by number in Python's fractions, which round where float32 does.

Everything is compared exactly.
"""

from bisect import bisect_left

import numpy
import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT, randn
from .nf4_data import CODES, NF4, SCALES, SHAPES, weights_of

BITSANDBYTES = "bitsandbytes 0.50.2: quantize_4bit(weight, quant_type='nf4', compress_statistics=False)"
ONE_BY_ONE = "numpy's float32, number by number"
EIGHTHS = [-1.0, *(-number / 8 for number in range(7, 1, -1)), 0.0, *(number / 8 for number in range(1, 9))]


def of(weight, values=NF4, block=64, dtype=torch.float32):
    def given():
        made = torch.tensor(weight, dtype=dtype) if isinstance(weight, list) else weight()
        return {"weight": made, "values": torch.tensor(values), "block": block}

    return given


def drawn(*shape, values=NF4, block=64, dtype=torch.float32, seed=1):
    return of(lambda: randn(*shape, seed=seed).to(dtype), values, block)


def one_by_one(weight, values, block):
    flat = weight.float().contiguous().view(-1).numpy()
    borders = [float(numpy.float32((low + high) / numpy.float32(2))) for low, high in zip(values.numpy(), values.numpy()[1:], strict=False)]
    scales = [max(abs(number) for number in flat[first : first + block]) for first in range(0, len(flat), block)]
    codes = []
    for place, number in enumerate(flat):
        factor = numpy.float32(1) / max(scales[place // block], numpy.float32(1e-38))
        codes.append(bisect_left(borders, float(number * factor)))
    codes += [bisect_left(borders, 0.0)] * (len(codes) % 2)
    packed = [16 * first + second for first, second in zip(codes[::2], codes[1::2], strict=True)]
    return {"codes": torch.tensor(packed, dtype=torch.uint8), "scales": torch.tensor(numpy.array(scales, dtype=numpy.float32))}


def by_bitsandbytes(kind):
    return lambda **_: {"codes": torch.tensor(list(bytes.fromhex(CODES[kind])), dtype=torch.uint8),
                        "scales": torch.tensor([float.fromhex(number) for number in SCALES[kind].split()])}  # fmt: skip


def answer(codes, scales):
    return lambda **_: {"codes": torch.tensor(codes, dtype=torch.uint8), "scales": torch.tensor(scales)}


def strided(how):
    """[6, 10] weights whose numbers do not lie in row-major order in memory."""

    def made():
        weight = randn(6, 10, seed=4).float()
        return weight.T.contiguous().T if how == "transposed" else torch.stack([weight, 9 * weight], dim=-1)[..., 0]

    return of(made, block=12)


def written_to(function, weight, values, block):
    """A parameter, as a layer has it: the results have no gradient, and share no memory with it."""
    codes, scales = function(torch.nn.Parameter(weight), values, block)
    found = {"codes": codes.clone(), "scales": scales.detach().clone(), "wants a gradient": codes.requires_grad}
    scales.detach().zero_()
    return found


def without_gradient(**given):
    return one_by_one(**given) | {"wants a gradient": False}


def given_sizes(function):
    sizes = {name: drawn(blocks, 64, seed=3)() for name, blocks in (("100 blocks", 100), ("600 blocks", 600))}
    return cost(function, 10, 100 * 64 * 4, sizes)


def case(rung, title, given, expected=one_by_one, source=ONE_BY_ONE, observe=None):
    return Case(rung, title, given, expected, source, observe)


def example(title, weight, codes, scales, values=EIGHTHS, block=2, source="arithmetic"):
    return case("worked example", title, of(weight, values, block), answer(codes, scales), source)


CONTRACTS = (torch.cat([torch.arange(-7, 0) / 7, torch.arange(9) / 8])).tolist()
HALVES = [-15 / 16, -0.5625, -0.1875, -0.125, -0.0625, 0.0625, 0.1875, 0.3125, 0.9375, 1.0]
ABOUT = 9.0 * 2.0**-130  # smaller than 1e-38

CHECK = Check(
    exercise="10.quantize_nf4",
    outputs=("codes", "scales"),
    spoilt=("codes", "scales"),
    cases=[
        case("shape and dtype", "[3, 64] float32", drawn(3, 64), source=CONTRACT),
        case("shape and dtype", "[5, 7] bfloat16, in blocks of 8", drawn(5, 7, block=8, dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's", [0.5, -2.0, 4.0, 0.1], [144, 247], [2.0, 4.0], CONTRACTS, source=CONTRACT),
        example("the largest is 1: the values themselves have the codes 0 to 15", [-1.0, -0.5, 0.0, 0.25, 0.5, 0.625, 0.875, 1.0],
                [0x04, 0x79, 0xBC, 0xEF], [1.0], block=8),
        example("the scale is 10, and is that of a negative number", [-10.0, 5.0, 2.5, 0.0], [0x0B, 0x97], [10.0], block=4),
        example("each block has its own scale", [1.0, 0.5, 100.0, 50.0, -0.01, 0.005], [0xFB, 0xFB, 0x0B], [1.0, 100.0, 0.01]),
        example("nearest, up and down: 0.55, 0.6, -0.3, -0.32", [0.55, 0.6, -0.3, -0.32, 1.0, 1.0], [0xBC, 0x65, 0xFF], [1.0], block=6),
        example("a block of zeros", [0.0, 0.0, 0.0, 3.0], [0x77, 0x7F], [0.0, 3.0]),
        example("an odd number of codes", [1.0, -1.0, 0.5], [0xF0, 0xF7], [1.0, 0.5]),
        case("property", "numbers on a border take the lower value", of(HALVES, EIGHTHS, 10)),
        case("property", "... under a scale of 4", of([4 * number for number in HALVES], EIGHTHS, 10)),
        case("property", "the last block is short", drawn(3, 7, block=8)),
        case("property", "... and has a scale of its own", of([1.0, 2.0, 4.0, 8.0, 0.001, -0.0005], block=4)),
        case("property", "a block larger than the weight", drawn(5, 3, block=64)),
        case("property", "blocks of one number", drawn(7, block=1)),
        case("property", "blocks that begin within a row", drawn(5, 9, block=6)),
        case("property", "blocks of an odd number", drawn(7, 5, block=5)),
        case("property", "a single number", of([-3.0])),
        case("property", "a tensor without dimensions", of(lambda: torch.tensor(0.5))),
        case("property", "a tensor of three dimensions", drawn(2, 3, 11, block=16)),
        case("property", "no numbers", of(lambda: torch.zeros(0, 4))),
        case("property", "all zeros", of(lambda: torch.zeros(3, 10), block=4)),
        case("property", "tiny numbers: scales below 1e-38", of([ABOUT, -ABOUT, ABOUT / 2, 0.0, 1e-30, 2e-30, 1e-42, 0.0], block=4)),
        case("property", "huge numbers", of([3e38, -1e38, 2e37, 0.0], block=4)),
        case("property", "a transposed weight", strided("transposed")),
        case("property", "every second number of a tensor", strided("every second")),
        case("property", "bfloat16", drawn(8, 16, block=32, dtype=torch.bfloat16)),
        case("property", "float16", drawn(8, 16, block=32, dtype=torch.float16)),
        case("property", "float64, which becomes float32 first", drawn(8, 16, block=32, dtype=torch.float64)),
        case("property", "a trained weight, and who writes to the scales", drawn(4, 16, block=16), without_gradient, CONTRACT, written_to),
        case("property", "other values", drawn(8, 16, values=EIGHTHS, block=16)),
        *(case("oracle", f"{kind} {[*shape]}", of(lambda kind=kind: weights_of(kind)), by_bitsandbytes(kind), BITSANDBYTES)
          for kind, shape in SHAPES.items()),
        case("oracle", "products that another order of operations rounds to other codes", of(lambda: weights_of("close calls")),
             by_bitsandbytes("close calls"), BITSANDBYTES),
        case("budget", "more blocks, and memory, in tensors of a float32 for each number", dict, lambda: within(10), CONTRACT, given_sizes),
    ],
)  # fmt: skip
