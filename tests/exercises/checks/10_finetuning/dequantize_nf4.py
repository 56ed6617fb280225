"""Check of 10.dequantize_nf4. Oracle: bitsandbytes' codes and scales, decoded number by number with numpy, whose float32 product is what
bitsandbytes computes (tests/finetune/test_10_properties.py compares the two).

Everything is compared exactly.
"""

import numpy
import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT, randn
from .nf4_data import CODES, NF4, SCALES, SHAPES

ONE_BY_ONE = "numpy's float32, number by number"
BITSANDBYTES = "codes of bitsandbytes 0.50.2, each looked up and multiplied in numpy's float32"
HUNDREDTHS = [-1.0, *(number / 100 for number in range(-6, 0)), 0.0, *(number / 100 for number in range(11, 18)), 1.0]


def of(codes, scales, block=2, shape=(4,), values=HUNDREDTHS, dtype=torch.float32):
    def given():
        made = codes if isinstance(codes, torch.Tensor) else torch.tensor(codes, dtype=torch.uint8)
        return {"codes": made.clone(), "scales": torch.tensor(scales), "values": torch.tensor(values), "block": block, "shape": shape,
                "dtype": dtype}  # fmt: skip

    return given


def drawn(*shape, block=8, dtype=torch.float32, seed=1):
    """Any codes, any scales."""

    def given():
        numbers = torch.Size(shape).numel()
        codes = torch.randint(256, ((numbers + 1) // 2,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        scales = randn(-(-numbers // block), seed=seed).abs().float()
        return of(codes, [], block, shape, NF4, dtype)() | {"scales": scales}

    return given


def one_by_one(codes, scales, values, block, shape, dtype):
    halves = [half for byte in codes.tolist() for half in divmod(byte, 16)][: torch.Size(shape).numel()]
    table, factors = values.numpy(), scales.numpy()
    numbers = numpy.array([table[half] * factors[place // block] for place, half in enumerate(halves)], dtype=numpy.float32)
    return {"weight": torch.from_numpy(numbers).view(shape).to(dtype)}


def stored(kind, dtype):
    codes = list(bytes.fromhex(CODES[kind]))
    return of(codes, [float.fromhex(number) for number in SCALES[kind].split()], 64, SHAPES[kind], NF4, dtype)


def answer(weight, dtype=torch.float32):
    return lambda **_: {"weight": torch.tensor(weight, dtype=dtype)}


def strided():
    made = drawn(5, 7)()
    return made | {name: torch.stack([made[name], made[name].flip(0)], dim=-1)[:, 0] for name in ("codes", "scales")}


def written_to(function, **given):
    """Whoever writes to the result changes no argument, which the harness compares."""
    found = function(**given)
    kept = found.clone()
    found.fill_(7)
    return {"weight": kept}


def given_sizes(function):
    sizes = {name: drawn(blocks, 64, block=64, seed=3)() for name, blocks in (("100 blocks", 100), ("600 blocks", 600))}
    return cost(function, 8, 100 * 64 * 4, sizes)


def case(rung, title, given, expected=one_by_one, source=ONE_BY_ONE, observe=None):
    return Case(rung, title, given, expected, source, observe, rtol=0.0)


def example(title, given, weight, source="arithmetic"):
    return Case("worked example", title, given, answer(weight), source, rtol=1e-6)


CHECK = Check(
    exercise="10.dequantize_nf4",
    outputs=("weight",),
    spoilt=("weight",),
    cases=[
        case("shape and dtype", "[3, 4] float32", drawn(3, 4), source=CONTRACT),
        case("shape and dtype", "[5, 3] bfloat16", drawn(5, 3, dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's", of([240, 15], [1.0, 10.0], 2, (3,), torch.linspace(-1, 1, 16).tolist()), [1.0, -1.0, -10.0], CONTRACT),
        example("the first code is in the high four bits: 8 and 1, 7 and 15", of([0x81, 0x7F], [1.0], 4), [0.11, -0.06, 0.0, 1.0]),
        example("each block has its own scale: 10, then 1000", of([0x89, 0x89], [10.0, 1000.0]), [1.1, 1.2, 110.0, 120.0]),
        example("three numbers a block", of([0x89, 0xA8, 0x9A], [1.0, 100.0], 3, (2, 3)), [[0.11, 0.12, 0.13], [11.0, 12.0, 13.0]]),
        example("an odd number of codes", of([0x8F, 0x9F], [1.0, 10.0], 2, (3,)), [0.11, 1.0, 1.2]),
        case("property", "all 16 codes in both places", of([17 * code for code in range(16)], [3.0, 0.7], 16, (32,), NF4)),
        case("property", "the last block is short", drawn(3, 7)),
        case("property", "blocks that begin within a row", drawn(5, 9, block=6)),
        case("property", "blocks of an odd number", drawn(7, 5, block=5)),
        case("property", "blocks of one number", drawn(7, block=1)),
        case("property", "a block larger than the weight", drawn(3, 5, block=64)),
        case("property", "a low half that means nothing: any code may be there", of([0x89, 0x8F], [2.0, 3.0], 2, (3,))),
        case("property", "... and would begin a block of its own", of([0x89, 0x8F], [2.0, 3.0, 4.0], 1, (3,))),
        case("property", "a single number", of([0x8F], [2.0], 64, (1,))),
        case("property", "a tensor without dimensions", of([0x8F], [2.0], 64, ())),
        case("property", "a tensor of three dimensions", drawn(2, 3, 11)),
        case("property", "a shape that is a torch.Size, and one that is a list", lambda: drawn(4, 6)() | {"shape": torch.Size([4, 6])}),
        case("property", "no numbers", drawn(0, 4)),
        case("property", "a scale of 0", of([0x0F, 0x78], [0.0, 2.0])),
        case("property", "other values", of([0x89, 0xF0], [2.0], 4, (2, 2), torch.linspace(-1, 1, 16).tolist())),
        case("property", "tensors that are not contiguous", strided),
        case("property", "bfloat16: the product is rounded once", drawn(16, 16, dtype=torch.bfloat16)),
        case("property", "float16: the product is rounded once", drawn(16, 16, dtype=torch.float16)),
        case("property", "float16: a scale above what float16 holds", of([0x78, 0x9A], [1e5], 4, (4,), dtype=torch.float16)),
        case("property", "float16: numbers above what float16 holds become infinite",
             of([0xF0, 0x7F], [1e5], 4, (4,), dtype=torch.float16)),
        case("property", "huge and tiny scales", of([0xF0, 0x7F, 0x89, 0xF0], [1e38, 1e-40], 4, (8,))),
        case("property", "float64, of products in float32", drawn(16, 16, dtype=torch.float64)),
        case("property", "who writes to the result", drawn(4, 4), observe=written_to),
        *(case("oracle", f"{kind} {[*shape]}", stored(kind, getattr(torch, kind)), source=BITSANDBYTES) for kind, shape in SHAPES.items()),
        case("budget", "more blocks, and memory, in tensors like the result in float32", dict, lambda: within(8), CONTRACT, given_sizes),
    ],
)  # fmt: skip
