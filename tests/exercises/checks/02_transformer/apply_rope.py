"""Check of 02.apply_rope. Oracle: multiplication of complex numbers, x[i] + i x[i + d/2] times cos + i sin.

Tolerances. Each result is a sum of two products. float64 and float32 agree to the last digits unless the products nearly cancel,
so an absolute 1e-15 or 1e-6 stands beside the relative one. Half precision is rounded once, from float32: one unit in the
last place, 2**-7 for bfloat16 and 2**-10 for float16.
"""

import torch
from torch import Tensor

from shared.course.checking import Case, Check

from .common import randn
from .pieces import expecting, observing

CONTRACT = "the contract"
ORACLE = "torch's multiplication of complex numbers"


def tables(*positions: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [seq, size / 2] float32, of angles that differ for each pair."""
    angles = torch.tensor(positions).double()[:, None] * 3.0 ** -torch.arange(size // 2).double()
    return angles.cos().float(), angles.sin().float()


def random(batch: int, heads: int, seq: int, size: int, dtype=torch.float64):
    def given():
        cos, sin = tables(*range(seq), size=size)
        return {"x": randn(batch, heads, seq, size, seed=3, dtype=dtype), "cos": cos, "sin": sin}

    return given


def rows_of_their_own():
    """Two rows whose positions differ: tables [batch, 1, seq, d/2]."""
    one, other = tables(0, 1, 2, size=8), tables(5, 3, 11, size=8)
    return {
        "x": randn(2, 5, 3, 8, seed=3),
        "cos": torch.stack([one[0], other[0]])[:, None],
        "sin": torch.stack([one[1], other[1]])[:, None],
    }


def transposed():
    given = random(2, 7, 3, 8)()
    return given | {"x": randn(2, 3, 7, 8, seed=3).transpose(1, 2)}


def point(x: list, cos: list, sin: list):
    return lambda: {"x": torch.tensor([[[x]]]), "cos": torch.tensor([cos]), "sin": torch.tensor([sin])}


def answer(*values: float):
    return lambda **given: {"result": torch.tensor([[[values]]])}


def by_torch(x, cos, sin):
    wide = x if x.dtype == torch.float64 else x.float()
    half = x.shape[-1] // 2
    turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def result_by_torch(**given):
    return {"result": by_torch(**given)}


def product_of_positions(function, x, cos, sin):
    """Queries at positions 0, 1, 2 against keys 3 later: products of rows that lie equally far apart."""
    queries = function(x=x.expand(-1, -1, 3, -1), cos=cos[:3], sin=sin[:3])
    keys = function(x=x.flip(-1).expand(-1, -1, 3, -1), cos=cos[3:], sin=sin[3:])
    products = (queries * keys).sum(dim=-1).flatten()
    return {"differences between the three products": products - products[0]}


def one_vector():
    cos, sin = tables(0, 1, 2, 3, 4, 5, size=8)
    return {"x": randn(1, 1, 1, 8, seed=7), "cos": cos, "sin": sin}


def lengths(function, x, cos, sin):
    return {"lengths": function(x=x, cos=cos, sin=sin).norm(dim=-1)}


CHECK = Check(
    exercise="02.apply_rope",
    outputs=("result",),
    spoilt=("result", "gradients through result"),
    cases=[
        Case("shape and dtype", "[2, 3, 5, 8] in float32", random(2, 3, 5, 8, dtype=torch.float32), result_by_torch, CONTRACT),
        Case("shape and dtype", "bfloat16 stays bfloat16", random(1, 2, 3, 4, dtype=torch.bfloat16), result_by_torch, CONTRACT),
        Case("shape and dtype", "float64 stays float64, with float32 tables", random(1, 2, 3, 4), result_by_torch, CONTRACT),
        Case(
            "worked example",
            "a quarter turn of the pair (1, 0)",
            point([1.0, 0.0], [0.0], [1.0]),
            answer(0.0, 1.0),
            "arithmetic: (1, 0) turned by 90 degrees is (0, 1)",
        ),
        Case(
            "worked example",
            "the pairs (1, 10) and (2, 20), of which only the first turns, by 90 degrees",
            point([1.0, 2.0, 10.0, 20.0], [0.0, 1.0], [1.0, 0.0]),
            answer(-10.0, 2.0, 1.0, 20.0),
            "arithmetic: (1, 10) becomes (-10, 1), and (2, 20) stays; element i is paired with element i + d/2",
        ),
        Case(
            "worked example",
            "cos 0.6 and sin 0.8",
            point([5.0, 10.0], [0.6], [0.8]),
            answer(-5.0, 10.0),
            "arithmetic: 5 * 0.6 - 10 * 0.8 = -5, and 10 * 0.6 + 5 * 0.8 = 10",
        ),
        Case(
            "worked example",
            "float64: 2 and a little more, not turned; float32 would lose the little",
            lambda: {"x": torch.tensor([[[[2.0 + 2**-26, 0.0]]]], dtype=torch.float64), "cos": torch.ones(1, 1), "sin": torch.zeros(1, 1)},
            lambda **given: {"result": given["x"]},
            "the contract: float64 input is computed in float64",
            rtol=1e-12,
        ),
        Case(
            "property",
            "a rotation keeps lengths",
            random(2, 3, 5, 8),
            lambda x, cos, sin: {"lengths": x.norm(dim=-1)},
            "geometry; the tables are float32, so to 1e-6",
            observe=lengths,
        ),
        Case(
            "property",
            "products depend on the difference of positions only",
            one_vector,
            lambda **given: {"differences between the three products": torch.zeros(3).double()},
            "Su et al. 2021, equation 16; the tables are float32, so to 1e-5",
            observe=product_of_positions,
            atol=1e-5,
        ),
        Case("property", "rows with positions of their own", rows_of_their_own, result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("property", "as many heads as positions", random(3, 5, 5, 8), result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("property", "as many of everything", random(4, 4, 4, 8), result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("property", "one position", random(2, 3, 1, 2), result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("property", "x that is not contiguous", transposed, result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("oracle", "float64 [2, 3, 5, 8]", random(2, 3, 5, 8), result_by_torch, ORACLE, rtol=1e-12, atol=1e-15),
        Case("oracle", "float32 [2, 3, 7, 12]", random(2, 3, 7, 12, dtype=torch.float32), result_by_torch, ORACLE, atol=1e-6),
        Case("oracle", "bfloat16, computed in float32", random(2, 3, 7, 12, dtype=torch.bfloat16), result_by_torch, ORACLE, rtol=2**-7),
        Case("oracle", "float16, computed in float32", random(2, 3, 7, 12, dtype=torch.float16), result_by_torch, ORACLE, rtol=2**-10),
        Case(
            "oracle", "gradient of x", random(2, 3, 5, 8), expecting(by_torch, "x"), ORACLE, observe=observing("x"), rtol=1e-12, atol=1e-15
        ),
    ],
)
