"""Check of 04.activation_statistics. Oracle: NumPy in float64 on the finite elements.

Tolerances. Sums of up to a few thousand float32 numbers agree to 1e-6 relative; a mean near 0 is the rest of what cancels, so an
absolute 1e-6 stands beside it. In float64 1e-12. With a mean of 1,000 and a spread of 1, rounding the inputs to float32
costs nothing, since the oracle sees the same numbers, and float32's differences from the mean are good to 1e-4.
"""

import math

import numpy as np
import torch

from shared.course.checking import Case, Check

from .common import randn

CONTRACT = "the contract"
ORACLE = "NumPy's mean, std and max in float64"


def numbers(*values, dtype=torch.float32):
    return lambda: {"x": torch.tensor(values, dtype=dtype)}


def random(*shape: int, dtype=torch.float32, scale: float = 1.0, shift: float = 0.0):
    return lambda: {"x": (randn(*shape, seed=3, scale=scale) + shift).to(dtype)}


def one_broken(value: float):
    def given():
        x = randn(7, 11, 13, seed=5, dtype=torch.float32)
        x[2, 3, 5] = value
        return {"x": x}

    return given


def halved_by_relu():
    return {"x": randn(17, 19, seed=7, dtype=torch.float32).relu()}


def strided():
    """A third of it is 0."""
    x = randn(12, 14, seed=9)
    x[:, 5:10] = 0
    return {"x": x[::3, ::2].T}


def of_a_layer():
    return {"x": torch.tensor([[1.0, -1.0]], requires_grad=True) * 3}


def of_a_weight():
    return {"x": torch.tensor([1.0, -1.0], requires_grad=True)}


def what_it_leaves(function, x):
    try:
        function(x)
        return {"requires a gradient": x.requires_grad, "autograd records afterwards": torch.is_grad_enabled()}
    finally:
        torch.set_grad_enabled(True)


def as_before(x):
    return {"requires a gradient": True, "autograd records afterwards": True}


def counted_in_bfloat16():
    """517 zeros and 389 infinities among 1,001 elements: neither share is one of bfloat16's."""
    x = torch.ones(1001, dtype=torch.bfloat16)
    x[:517], x[517:906] = 0.0, torch.inf
    return {"x": x}


def answer(mean: float, std: float, rms: float, abs_max: float, zeros: float, not_finite: float):
    names = ("mean", "std", "rms", "abs_max", "zeros", "not_finite")
    return lambda **given: {"statistics": dict(zip(names, (mean, std, rms, abs_max, zeros, not_finite), strict=True))}


def by_numpy(x):
    every = x.detach().double().numpy()
    finite = every[np.isfinite(every)]
    figures = {
        "mean": finite.mean(), "std": finite.std(), "rms": np.linalg.norm(finite) / math.sqrt(finite.size), "abs_max": np.abs(finite).max(),
        "zeros": np.count_nonzero(every == 0) / every.size, "not_finite": 1 - finite.size / every.size,
    }
    return {"statistics": {name: float(value) for name, value in figures.items()}}


def by_numpy_case(rung: str, title: str, given, rtol: float = 1e-6, atol: float = 1e-6) -> Case:
    return Case(rung, title, given, by_numpy, ORACLE, rtol=rtol, atol=atol)


CHECK = Check(
    exercise="04.activation_statistics",
    outputs=("statistics",),
    spoilt=("statistics",),
    cases=[
        Case("shape and dtype", "six Python floats, of float32", random(3, 5), by_numpy, CONTRACT),
        Case("shape and dtype", "six Python floats, of a tensor with a graph", of_a_layer, by_numpy, CONTRACT),
        Case(
            "worked example", "(-1, 7)", numbers(-1.0, 7.0), answer(3.0, 4.0, 5.0, 7.0, 0.0, 0.0),
            "arithmetic: 3 in the middle, both 4 away; the mean square is (1 + 49) / 2",
        ),
        Case(
            "worked example", "eight elements, one of them infinite", numbers(0.0, 0.0, -2.0, 2.5, 3.0, 3.5, 3.5, torch.inf),
            answer(1.5, 2.0, 2.5, 3.5, 0.25, 0.125),
            "arithmetic: the sum of the finite seven is 10.5, of their squares 43.75; 2 of 8 and 1 of 8",
        ),
        Case("worked example", "the largest is negative", numbers(-7.0, 1.0), answer(-3.0, 4.0, 5.0, 7.0, 0.0, 0.0), "arithmetic"),
        Case("property", "one element: no spread, and not NaN", numbers(3.0), answer(3.0, 0.0, 3.0, 3.0, 0.0, 0.0), CONTRACT),
        Case(
            "property", "a single number without a dimension", lambda: {"x": torch.tensor(-2.0)}, answer(-2.0, 0.0, 2.0, 2.0, 0.0, 0.0),
            CONTRACT,
        ),
        Case("property", "nothing but zeros, one of them negative", numbers(0.0, -0.0), answer(0.0, 0.0, 0.0, 0.0, 1.0, 0.0), CONTRACT),
        Case(
            "property", "small numbers are no zeros", numbers(1e-30, 0.0, -1e-30, 0.0), answer(0.0, 0.0, 0.0, 1e-30, 0.5, 0.0),
            "the contract: exactly 0", atol=1e-20, rtol=1e-5,
        ),
        Case(
            "property", "nothing is finite", numbers(torch.inf, torch.nan, -torch.inf),
            answer(torch.nan, torch.nan, torch.nan, torch.nan, 0.0, 1.0), CONTRACT,
        ),
        by_numpy_case("property", "one NaN among 1,001 elements", one_broken(torch.nan)),
        by_numpy_case("property", "one minus infinity among 1,001 elements", one_broken(-torch.inf)),
        Case(
            "property", "float16: 40,000 twice and 30,000 twice: sums and squares are beyond its 65,504",
            numbers(40000.0, 40000.0, 30000.0, 30000.0, dtype=torch.float16), answer(35000.0, 5000.0, 1.25e9**0.5, 40000.0, 0.0, 0.0),
            "arithmetic: the mean square is (1.6 + 0.9) / 2 billion",
        ),
        by_numpy_case("property", "float32: a mean of 1,000 with a spread of 1", random(23, 29, shift=1000.0), rtol=1e-4),
        by_numpy_case(
            "property", "float64: a spread of a millionth around 1", random(23, 29, dtype=torch.float64, scale=1e-6, shift=1.0), 1e-8, 0.0
        ),
        by_numpy_case(
            "property", "float64: what float32 takes for 0 and for infinity", numbers(0.0, 1e-60, 3e60, -1e60, dtype=torch.float64), 1e-12
        ),
        Case("property", "a tensor without elements is refused", numbers(), lambda **given: {"raised": "ValueError"}, CONTRACT),
        by_numpy_case("property", "bfloat16: counts beyond 256, where it has no odd numbers any more", counted_in_bfloat16),
        Case(
            "property", "a tensor that requires a gradient, and autograd, are as before", of_a_weight, as_before, CONTRACT, what_it_leaves,
        ),
        by_numpy_case("oracle", "after a ReLU", halved_by_relu),
        by_numpy_case("oracle", "float64 that is not contiguous", strided, 1e-12, 1e-14),
        by_numpy_case("oracle", "bfloat16 [5, 7, 11]", random(5, 7, 11, dtype=torch.bfloat16, scale=3.0, shift=2.0)),
        by_numpy_case("oracle", "float16 [31, 37]", random(31, 37, dtype=torch.float16, scale=0.01)),
    ],
)
