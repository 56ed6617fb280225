"""Check of 10.merge_lora. Oracle: numpy in float64, matrix by matrix.

Tolerances. float64: 1e-12, float32: 1e-6 of numbers around 1. Numbers for 16 bits are chosen so that float32 holds every sum exactly: what
is rounded once is compared exactly.
"""

import numpy
import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT, cases_of, randn

NUMPY = "numpy in float64, rounded once"


def drawn(*leading, out=5, size=7, r=2, scaling=0.75, dtype=torch.float64, factors=None, seed=1):
    def given():
        kinds = {"weight": (out, size), "lora_A": (r, size), "lora_B": (out, r)}
        made = {name: randn(*leading, *shape, seed=seed + place) for place, (name, shape) in enumerate(kinds.items())}
        return {name: tensor.to(dtype if name == "weight" else factors or dtype) for name, tensor in made.items()} | {"scaling": scaling}

    return given


def of(weight, lora_A, lora_B, scaling, dtype=torch.float64, factors=None):
    tensors = {"weight": (weight, dtype), "lora_A": (lora_A, factors or dtype), "lora_B": (lora_B, factors or dtype)}
    return lambda: {name: torch.tensor(numbers, dtype=kind) for name, (numbers, kind) in tensors.items()} | {"scaling": scaling}


def exact(dtype, factors):
    """Numbers of few bits: float32 holds every product and sum exactly, and 16 bits hold weights and narrow factors."""
    one = 512 if factors == torch.float32 else 32

    def given():
        whole = torch.Generator().manual_seed(1)
        draw = lambda most, *shape: torch.randint(1 - most, most, shape, generator=whole).float()  # noqa: E731
        return {
            "weight": (draw(32, 6, 9) / 16).to(dtype), "lora_A": (draw(one, 3, 9) / one).to(factors),
            "lora_B": (draw(one, 6, 3) / one).to(factors), "scaling": 0.125,
        }  # fmt: skip

    return given


def by_numpy(weight, lora_A, lora_B, scaling):
    a, b = (tensor.double().reshape(-1, *tensor.shape[-2:]).numpy() for tensor in (lora_A, lora_B))
    update = numpy.stack([scaling * numpy.matmul(one, other) for one, other in zip(b, a, strict=True)])
    return {"merged": (weight.double() + torch.from_numpy(update).view(weight.shape)).to(weight.dtype)}


def answer(merged):
    return lambda weight, **_: {"merged": torch.tensor(merged, dtype=weight.dtype)}


def used(function, **given):
    """One product with the merged weight, compared to three."""
    x = randn(3, given["weight"].shape[-1], seed=5)
    return {"x with the merged weight": F.linear(x, function(**given))}


def in_three(weight, lora_A, lora_B, scaling):
    x = randn(3, weight.shape[-1], seed=5)
    return {"x with the merged weight": F.linear(x, weight) + scaling * F.linear(F.linear(x, lora_A), lora_B)}


def and_back(function, weight, lora_A, lora_B, scaling):
    return {"merged and taken out again": function(function(weight, lora_A, lora_B, scaling), lora_A, lora_B, -scaling)}


def written_to(function, **given):
    """Whoever writes to the result changes no argument, which the harness compares."""
    found = function(**given)
    kept = found.clone()
    found.fill_(7)
    return {"merged": kept}


def stacked(function, **given):
    """Two adapters, one after the other."""
    other = drawn(r=3, seed=9)()
    first = function(**given)
    return {"merged": function(first, other["lora_A"], other["lora_B"], -1.5)}


def both(**given):
    other = drawn(r=3, seed=9)()
    return by_numpy(by_numpy(**given)["merged"], other["lora_A"], other["lora_B"], -1.5)


def strided():
    made = drawn(3)()
    return {name: value if name == "scaling" else value.mT.contiguous().mT for name, value in made.items()}


def given_sizes(function):
    sizes = {name: drawn(*leading, out=37, size=41, r=r, dtype=torch.float32)() for name, leading, r in (
        ("first", (2,), 4), ("rank 16", (2,), 16), ("20 matrices", (20,), 4))}  # fmt: skip
    return cost(function, 3.3, 2 * 37 * 41 * 4, sizes)


case = cases_of(by_numpy, NUMPY)


def example(title, given, merged, source="arithmetic"):
    return Case("worked example", title, given, answer(merged), source, rtol=0.0)


EYE = [[1.0, 0.0], [0.0, 1.0]]
STEP = 2**-8  # half of bfloat16's step between 1 and 2

CHECK = Check(
    exercise="10.merge_lora",
    outputs=("merged",),
    spoilt=("merged",),
    cases=[
        case("shape and dtype", "float32 [5, 7], rank 2", drawn(dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "a weight in bfloat16, factors in float32", drawn(dtype=torch.bfloat16, factors=torch.float32),
             source=CONTRACT),
        case("shape and dtype", "a weight in float32, factors in bfloat16", drawn(dtype=torch.float32, factors=torch.bfloat16),
             source=CONTRACT),
        example("the contract's", of(EYE, [[1.0, 1.0]], [[0.0], [10.0]], 0.5), [[1.0, 0.0], [5.0, 6.0]], CONTRACT),
        example("A and B differ in each number", of([[100.0, 200.0, 300.0], [400.0, 500.0, 600.0]], [[1.0, 2.0, 3.0]], [[10.0], [20.0]],
                                                    1.0), [[110.0, 220.0, 330.0], [420.0, 540.0, 660.0]]),
        example("rank 2: 2 * (1 * 3 + 10 * 4)", of([[0.0]], [[3.0], [4.0]], [[1.0, 10.0]], 2.0), [[86.0]]),
        example("two experts, each with factors of its own", of([[[0.0, 0.0]], [[1.0, 1.0]]], [[[1.0, 2.0]], [[3.0, 4.0]]],
                                                                [[[10.0]], [[100.0]]], 1.0),
                [[[10.0, 20.0]], [[301.0, 401.0]]]),
        example("B is 0: nothing changes", of([[1.5, 2.5]], [[3.0, 4.0]], [[0.0]], 2.0), [[1.5, 2.5]]),
        case("property", "scaling 0.0625", drawn(scaling=0.0625)),
        case("property", "rank 1", drawn(r=1)),
        case("property", "a rank above both widths", drawn(out=2, size=3, r=5)),
        case("property", "as many features in as out as ranks", drawn(out=4, size=4, r=4)),
        case("property", "weights [2, 3, 5, 7]", drawn(2, 3)),
        case("property", "as many experts as ranks and features", drawn(4, out=4, size=4, r=4)),
        case("property", "three times: who writes to the result", drawn(3), observe=written_to),
        case("property", "a scaling of 0, and who writes to the result", drawn(scaling=0.0), observe=written_to),
        case("property", "tensors that are not contiguous", strided),
        case("property", "merged and taken out again", drawn(scaling=0.5), lambda weight, **_: {"merged and taken out again": weight},
             "the contract: a negative scaling", and_back),
        case("property", "two adapters", drawn(), both, NUMPY, stacked),
        case("property", "one product for three", drawn(), in_three, "chapter 10's first equation", used),
        case("property", "bfloat16: updates of half a step, and of a little more",
             of([[1.0, 1.0]], [[STEP, STEP], [0.0, 2**-20]], [[1.0, 1.0]], 1.0, torch.bfloat16), answer([[1.0, 1 + 2 * STEP]]),
             "arithmetic: half a step goes to the even neighbour, more goes up", tolerance=0.0),
        case("property", "bfloat16, rounded once", exact(torch.bfloat16, torch.bfloat16), tolerance=0.0),
        case("property", "float16, rounded once", exact(torch.float16, torch.float16), tolerance=0.0),
        case("property", "a weight in bfloat16, factors in float32, rounded once", exact(torch.bfloat16, torch.float32), tolerance=0.0),
        case("property", "a weight in float16, factors in bfloat16, rounded once", exact(torch.float16, torch.bfloat16), tolerance=0.0),
        case("property", "float64 keeps its digits", drawn(dtype=torch.float64, factors=torch.float64, seed=7)),
        case("property", "a weight in float64, factors in float32", drawn(factors=torch.float32)),
        case("oracle", "float32 [43, 29], rank 8", drawn(out=43, size=29, r=8, dtype=torch.float32), tolerance=1e-5),
        case("oracle", "float64: three experts [13, 11], rank 6", drawn(3, out=13, size=11, r=6)),
        case("budget", "more matrices, a higher rank, and memory, in tensors like `weight`", dict, lambda: within(3.3), CONTRACT,
             given_sizes),
    ],
)  # fmt: skip
