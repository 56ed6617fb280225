"""Check of 02.rms_norm. Oracle: torch.nn.functional.rms_norm.

Tolerances. float64: sums of at most 23 squares agree to a few 1e-16, so 1e-12 is generous. float32: 1e-6 is 8 units in the last
place. Half precision is rounded from float32, so it may differ by one unit in the last place: 2**-7 for bfloat16, 2**-10
for float16. Where a bfloat16 rounding itself is asked for, the numbers lie far from the middle between two of its values.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check

from .common import randn
from .pieces import expecting, observing

CONTRACT = "the contract"
ORACLE = "torch.nn.functional.rms_norm in float32 or wider, cast to the dtype of x, times the weight"


def exactly(x: list, weight: list, eps: float = 0.0, dtype=torch.float32, weight_dtype=None):
    return lambda: {"x": torch.tensor(x, dtype=dtype), "weight": torch.tensor(weight, dtype=weight_dtype or dtype), "eps": eps}


def random(*shape: int, dtype=torch.float64, eps: float = 1e-5, scale: float = 1.0):
    return lambda: {"x": randn(*shape, seed=3, dtype=dtype, scale=scale), "weight": randn(shape[-1], seed=5, dtype=dtype), "eps": eps}


def transposed():
    given = random(7, 5, 3)()
    return given | {"x": given["x"].transpose(0, 1)}


def not_finite():
    return exactly([[3.0, torch.nan, 4.0], [3.0, torch.inf, 4.0], [1.0, 7.0, 5.0]], [1.0, 2.0, 3.0])()


def not_finite_by_torch(x, weight, eps):
    """Infinity over infinity is no number; what is finite beside it is divided to 0."""
    found = by_torch(x.nan_to_num(posinf=0.0), weight, eps)
    found[0], found[1] = torch.nan, torch.tensor([0.0, torch.nan, 0.0])
    return {"result": found}


def answer(*values: float, dtype=torch.float32):
    return lambda **given: {"result": torch.tensor(values, dtype=dtype)}


def by_torch(x, weight, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype) * weight


def result_by_torch(**given):
    return {"result": by_torch(**given)}


def gradient_case(title: str, given, rtol: float = 1e-11) -> Case:
    leaves = ("x", "weight")
    return Case("oracle", title, given, expecting(by_torch, *leaves), ORACLE, observe=observing(*leaves), rtol=rtol, atol=1e-14)


CHECK = Check(
    exercise="02.rms_norm",
    outputs=("result",),
    spoilt=("result", "gradients through result"),
    forbidden=("rms_norm", "layer_norm"),
    cases=[
        Case("shape and dtype", "a vector", random(7, dtype=torch.float32), result_by_torch, CONTRACT),
        Case("shape and dtype", "[2, 3, 5] in float64", random(2, 3, 5), result_by_torch, CONTRACT),
        Case("shape and dtype", "bfloat16 stays bfloat16", random(3, 5, dtype=torch.bfloat16), result_by_torch, CONTRACT),
        Case(
            "worked example",
            "(1, 7) has the root mean square 5",
            exactly([1.0, 7.0], [1.0, 1.0]),
            answer(0.2, 1.4),
            "arithmetic: (1 + 49) / 2 = 25, whose root is 5",
        ),
        Case(
            "worked example",
            "(1, 7) with weights 10 and 100",
            exactly([1.0, 7.0], [10.0, 100.0]),
            answer(2.0, 140.0),
            "arithmetic: 0.2 * 10 and 1.4 * 100",
        ),
        Case(
            "worked example",
            "two rows, each with a root mean square of its own",
            exactly([[1.0, 7.0], [2.0, 14.0]], [1.0, 1.0]),
            lambda **given: {"result": torch.tensor([[0.2, 1.4], [0.2, 1.4]])},
            "arithmetic: the roots are 5 and 10",
        ),
        Case(
            "worked example",
            "eps = 8 makes the root of 17 + 8 a 5",
            exactly([3.0, 5.0], [1.0, 1.0], eps=8.0),
            answer(0.6, 1.0),
            "arithmetic: (9 + 25) / 2 + 8 = 25",
        ),
        Case(
            "worked example",
            "bfloat16 (1, 2, 2, 4), float32 weights: rounded to bfloat16 in between",
            exactly([1.0, 2.0, 2.0, 4.0], [1.1, 0.7, 3.0, 0.3], dtype=torch.bfloat16, weight_dtype=torch.float32),
            answer(0.400390625 * 1.1, 0.80078125 * 0.7, 0.80078125 * 3.0, 1.6015625 * 0.3),
            "the contract: 0.4, 0.8, 0.8, 1.6 in bfloat16, and only then times the weight",
        ),
        Case(
            "worked example",
            "float64: 2, and a little more at last, which float32 cannot tell apart",
            exactly([2.0, 2.0, 2.0, 2.0 + 2**-26], [1.0] * 4, dtype=torch.float64),
            result_by_torch,
            "the contract: float64 input is computed in float64",
            rtol=1e-12,
        ),
        Case(
            "property",
            "zeros stay zeros",
            exactly([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], eps=1e-5),
            answer(0.0, 0.0, 0.0),
            "the contract: eps keeps the root from 0",
        ),
        Case(
            "property",
            "float16: 3,000 squared is beyond its 65,504",
            random(5, 7, dtype=torch.float16, scale=3000.0),
            result_by_torch,
            ORACLE,
            rtol=2**-10,
        ),
        Case(
            "property",
            "a constant vector is all the same length",
            exactly([5.0] * 4, [1.0] * 4),
            answer(1.0, 1.0, 1.0, 1.0),
            "arithmetic: 5 / 5; the mean is not subtracted",
        ),
        Case(
            "property",
            "a row with NaN and one with infinity, and one beside them",
            not_finite,
            not_finite_by_torch,
            "the contract: NaN is not hidden",
        ),
        Case(
            "property",
            "every row by itself, however different in size",
            lambda: {
                "x": randn(5, 7, seed=3) * torch.tensor([1e-2, 1.0, 1e2, 1e4, 3.0]).double()[:, None],
                "weight": randn(7, seed=5),
                "eps": 1e-5,
            },
            result_by_torch,
            ORACLE,
            rtol=1e-12,
        ),
        Case("oracle", "float64, a large eps", random(5, 7, eps=0.5), result_by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "float64 that is not contiguous", transposed, result_by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "float32 [3, 11, 23]", random(3, 11, 23, dtype=torch.float32), result_by_torch, ORACLE),
        Case("oracle", "bfloat16 [3, 11, 23]", random(3, 11, 23, dtype=torch.bfloat16), result_by_torch, ORACLE, rtol=2**-6),
        Case("oracle", "eps = 1e-6 beside small squares", random(3, 5, scale=1e-3, eps=1e-6), result_by_torch, ORACLE, rtol=1e-11),
        Case("oracle", "eps = 1e-3 beside small squares", random(3, 5, scale=1e-2, eps=1e-3), result_by_torch, ORACLE, rtol=1e-11),
        gradient_case("gradients at zeros", lambda: {"x": torch.zeros(2, 3).double(), "weight": randn(3, seed=5), "eps": 1e-4}),
        gradient_case("gradients of a vector", random(7)),
        gradient_case("gradients of [3, 5, 11]", random(3, 5, 11, eps=0.1)),
    ],
)
