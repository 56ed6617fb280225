"""Check of 05.newton_schulz. Oracle: the singular value decomposition, with the polynomial applied to the singular values alone.

Tolerances. Five steps of a polynomial of degree 5 multiply rounding by at most its slopes, about 3.4 each: 1e-16 grows to 1e-13, so
1e-11 in float64 and 2e-4 in float32 (1e-7 times 3.4^5 is 5e-5). bfloat16 has 8 bits, and its roundings nearly cancel over a row of 11:
results lie within 0.1 of the exact ones, where a matrix of them has entries of about 0.3; that case asks for the dtype and the size.
"""

import torch

from shared.course.checking import Case, Check

from .common import randn

CONTRACT = "the contract"
ORACLE = "torch.linalg.svd, and a s + b s^3 + c s^5 on the singular values"
TWO_STEPS = 1.5 * 2.125 / 50**0.5
CUBIC = (1.5, -0.5, 0.0)  # the classic coefficients, which converge to 1


def given(matrices, **more):
    return lambda: {"matrices": matrices.clone()} | more


def random(*shape: int, dtype=torch.float64, **more):
    return lambda: {"matrices": randn(*shape, seed=11, dtype=dtype)} | more


def transposed():
    return {"matrices": randn(2, 7, 5, seed=11).mT}


def of_sizes():
    """Three matrices whose sizes differ by millions."""
    return {"matrices": randn(3, 5, 7, seed=11) * torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None, None]}


def one_of_three():
    matrices = randn(3, 5, 7, seed=11)
    matrices[0, 2, 3], matrices[1, 4, 0] = torch.nan, torch.inf
    return {"matrices": matrices}


def third_alone(matrices):
    broken = torch.full_like(matrices[:2], torch.nan)
    return {"result": torch.cat([broken, by_svd(matrices[2:])["result"]])}


def with_autograd(function, matrices):
    try:
        return {"result": function(matrices), "autograd records afterwards": torch.is_grad_enabled()}
    finally:
        torch.set_grad_enabled(True)


def by_svd(matrices, steps=5, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7):
    a, b, c = coefficients
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.pow(2).sum(dim=-1, keepdim=True).sqrt().clamp(min=eps)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return {"result": (left @ torch.diag_embed(values) @ right).to(matrices.dtype)}


def exactly(rows: list, dtype=torch.float64):
    return lambda **_: {"result": torch.tensor(rows, dtype=dtype)}


def side_of_products(function, matrices, **more):
    """How large the square matrices are that products make."""
    with Products() as seen:
        function(matrices, **more)
    return {"side of the square products": max(seen.sides, default=0)}


def dtype_of_products(function, matrices):
    """Whether every product is made in the matrices' dtype."""
    with Products() as seen:
        function(matrices)
    return {"every product is in the matrices' dtype": seen.dtypes == {matrices.dtype}}


class Products(torch.overrides.TorchFunctionMode):
    """Notes the dtypes of what products make, and the sides of the square matrices among them."""

    def __init__(self):
        super().__init__()
        self.sides, self.dtypes = [], set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        product = getattr(function, "__name__", "") in ("matmul", "__matmul__", "mm", "bmm", "baddbmm", "addmm", "einsum")
        if product:
            self.dtypes.add(out.dtype)
        if product and out.shape[-1] == out.shape[-2]:
            self.sides.append(out.shape[-1])
        return out


def singular_values_between(function, matrices):
    values = torch.linalg.svdvals(function(matrices).nan_to_num())
    return {"all singular values lie between 0.6 and 1.3": bool(((values > 0.6) & (values < 1.3)).all())}


def oracle(title: str, make, rtol: float = 1e-11, atol: float = 1e-11, rung: str = "oracle") -> Case:
    return Case(rung, title, make, by_svd, ORACLE, rtol=rtol, atol=atol)


CHECK = Check(
    exercise="05.newton_schulz",
    outputs=("result",),
    spoilt=("result",),
    cases=[
        Case("shape and dtype", "[2, 3] in float32", random(2, 3, dtype=torch.float32), by_svd, CONTRACT),
        Case("shape and dtype", "[2, 7, 5] in float64", random(2, 7, 5), by_svd, CONTRACT),
        Case("shape and dtype", "bfloat16 stays bfloat16", random(5, 11, dtype=torch.bfloat16), by_svd, CONTRACT),
        Case(
            "worked example", "a diagonal matrix, one step of s + s^3",
            given(torch.diag(torch.tensor([3.0, 4.0]).double()), steps=1, coefficients=(1.0, 1.0, 0.0)),
            exactly([[0.816, 0.0], [0.0, 1.312]]), "arithmetic: the norm is 5; 0.6 + 0.216 and 0.8 + 0.512", rtol=1e-12, atol=1e-15,
        ),
        Case(
            "worked example", "one step of s^5 alone",
            given(torch.diag(torch.tensor([3.0, -4.0]).double()), steps=1, coefficients=(0.0, 0.0, 1.0)),
            exactly([[0.07776, 0.0], [0.0, -0.32768]]), "arithmetic: 0.6^5 and 0.8^5, with the sign kept", rtol=1e-12, atol=1e-15,
        ),
        Case(
            "worked example", "two steps of s + s^3 on a rotation times 5: both singular values are 5",
            given(torch.tensor([[3.0, 4.0], [-4.0, 3.0]]).double(), steps=2, coefficients=(1.0, 1.0, 0.0)),
            exactly([[3 * TWO_STEPS, 4 * TWO_STEPS], [-4 * TWO_STEPS, 3 * TWO_STEPS]]),
            "arithmetic: the norm is the root of 50, so s^2 is 0.5, then 1.125: times 1.5 and times 2.125", rtol=1e-12,
        ),
        Case(
            "worked example", "no steps: the matrix by its norm", given(torch.tensor([[3.0, 0.0, 4.0]]).double(), steps=0),
            exactly([[0.6, 0.0, 0.8]]), "arithmetic: the norm is 5", rtol=1e-12, atol=1e-15,
        ),
        Case(
            "worked example", "eps = 10 above a norm of 5", given(torch.tensor([[3.0, 0.0, 4.0]]).double(), steps=0, eps=10.0),
            exactly([[0.3, 0.0, 0.4]]), "the contract: divided by max(norm, eps)", rtol=1e-12, atol=1e-15,
        ),
        Case(
            "property", "zeros stay zeros", given(torch.zeros(3, 5).double()), exactly([[0.0] * 5] * 3),
            "the contract: eps keeps the norm from 0",
        ),
        Case(
            "property", "five steps bring every singular value near 1", random(7, 11),
            lambda matrices: {"all singular values lie between 0.6 and 1.3": True}, "Jordan et al. 2024", singular_values_between,
        ),
        Case(
            "property", "a tall matrix: the products are 3 by 3, not 11 by 11", random(11, 3),
            lambda matrices: {"side of the square products": 3}, "the contract: the smaller of the two sides", side_of_products,
        ),
        Case(
            "property", "a wide matrix: they are 3 by 3 too", random(3, 11),
            lambda matrices: {"side of the square products": 3}, "the contract: the smaller of the two sides", side_of_products,
        ),
        Case(
            "property", "a stack of two tall matrices: 3 by 3 as well", random(2, 11, 3),
            lambda matrices: {"side of the square products": 3}, "the contract: the smaller of the two sides", side_of_products,
        ),
        Case(
            "property", "the products of bfloat16 matrices are bfloat16", random(3, 11, dtype=torch.bfloat16),
            lambda matrices: {"every product is in the matrices' dtype": True}, "the contract: the computation keeps the dtype",
            dtype_of_products,
        ),
        Case(
            "property", "in a stack one matrix holds NaN and one infinity: neither is hidden, and the third is not touched", one_of_three,
            third_alone, f"the contract; {ORACLE}", rtol=1e-11, atol=1e-11,
        ),
        Case(
            "property", "autograd records afterwards as before", random(3, 5),
            lambda matrices: by_svd(matrices) | {"autograd records afterwards": True}, CONTRACT, with_autograd, rtol=1e-11, atol=1e-11,
        ),
        oracle("each matrix by its own norm", of_sizes, rung="property"),
        oracle("wide: [5, 7]", random(5, 7)),
        oracle("tall: [11, 3]", random(11, 3)),
        oracle("a batch of batches: [2, 3, 5, 7]", random(2, 3, 5, 7)),
        oracle("a batch that is transposed", transposed),
        oracle("ten steps of the classic coefficients, which end at 1", random(3, 5, steps=10, coefficients=CUBIC)),
        oracle("float32 [5, 11]", random(5, 11, dtype=torch.float32), rtol=2e-4, atol=2e-4),
        oracle("bfloat16 [5, 11]", random(5, 11, dtype=torch.bfloat16), rtol=0.0, atol=0.1),
    ],
)  # fmt: skip
