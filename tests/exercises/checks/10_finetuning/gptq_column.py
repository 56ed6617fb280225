"""Check of 10.gptq_column. Oracle: least squares. What GPTQ computes column by column is the minimum, over the columns that are not
quantized yet, of the error of the layer's outputs, (w - q) H (w - q)^T, which torch.linalg.solve gives without any factor of H.

Tolerances. float64: 1e-9 of numbers around 1, behind a solve with a matrix of condition up to 1e3; one column by hand: 1e-12, float32:
1e-5. The quantized column is compared exactly.
"""

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT, randn

HAND = "the contract's two equations, number by number"
SOLVED = "least squares: torch.linalg.solve with the Hessian of the columns that are left"


def halves(column):
    """Round to multiples of 0.5."""
    return (column * 2).round() / 2


def by_row(column):
    """Round to multiples of a step that differs by row, between -2 and 2 steps."""
    step = 0.25 * torch.arange(1, len(column) + 1, dtype=column.dtype)
    return (column / step).round().clamp(-2, 2) * step


def itself(column):
    """Everything is allowed."""
    return column


def of(weights, column, factor, quantize=torch.round, dtype=torch.float64):
    return lambda: {"weights": torch.tensor(weights, dtype=dtype), "column": column, "factor": torch.tensor(factor, dtype=dtype),
                    "quantize": quantize}  # fmt: skip


def hessian(size, seed):
    x = randn(3 * size, size, seed=seed) @ (torch.eye(size).double() + 0.3 * randn(size, size, seed=seed + 1))
    return 2 * x.T @ x / len(x)


def factor_of(size, seed=3):
    return torch.linalg.cholesky(torch.linalg.inv(hessian(size, seed)), upper=True)


def drawn(out, size, column, quantize=halves, dtype=torch.float64, seed=1):
    def given():
        tensors = {"weights": 2 * randn(out, size, seed=seed).to(dtype), "factor": factor_of(size).to(dtype)}
        return tensors | {"column": column, "quantize": quantize}

    return given


def done(function, weights, column, factor, quantize):
    """The error and the weights afterwards, the quantized column by itself, and what `quantize` was called with."""
    seen = []

    def recorded(given):
        seen.append(given.clone())
        return quantize(given)

    error = function(weights, column, factor, recorded)
    return {"error": error, "weights": weights, "calls of quantize": len(seen), "what is quantized": seen[0] if seen else None,
            "error and weights share memory": error.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()}  # fmt: skip


def by_hand(weights, column, factor, quantize):
    after, before = weights.clone(), weights[:, column].clone()
    quantized = quantize(before.clone())
    error = torch.stack([(own - kept) / factor[column, column] for own, kept in zip(before, quantized, strict=True)])
    for row in range(len(weights)):
        after[row, column] = quantized[row]
        for later in range(column + 1, weights.shape[1]):
            after[row, later] = weights[row, later] - error[row] * factor[column, later]
    return {"error": error, "weights": after, "calls of quantize": 1, "what is quantized": before, "error and weights share memory": False}


def answer(error, weights):
    return lambda **_: {"error": torch.tensor(error, dtype=torch.float64), "weights": torch.tensor(weights, dtype=torch.float64)}


def of_example(function, **given):
    return {"error": function(**given), "weights": given["weights"]}


def exact_column(function, weights, column, factor, quantize):
    function(weights, column, factor, quantize)
    return {"column": weights[:, column]}


def of_column(weights, column, factor, quantize):
    return {"column": quantize(weights[:, column].clone())}


def in_part(function, out, size, first, last, column):
    """The block is a part of a larger matrix, of which nothing else changes."""
    whole = 2 * randn(out, size, seed=1)
    error = function(whole[:, first:last], column, factor_of(size)[first:last, first:last], halves)
    return {"error": error, "the whole matrix": whole}


def part_by_hand(out, size, first, last, column):
    whole = 2 * randn(out, size, seed=1)
    found = by_hand(whole[:, first:last], column, factor_of(size)[first:last, first:last], halves)
    whole[:, first:last] = found["weights"]
    return {"error": found["error"], "the whole matrix": whole}


def all_columns(function, out, size, block):
    """A whole matrix: columns in blocks, whose errors reach the columns behind the block in one product (algorithm 1)."""
    weights, factor = 2 * randn(out, size, seed=1), factor_of(size, seed=7)
    for first in range(0, size, block):
        last = min(first + block, size)
        errors = [function(weights[:, first:last], column, factor[first:last, first:last], by_row) for column in range(last - first)]
        weights[:, last:] -= torch.stack(errors, dim=1) @ factor[first:last, last:]
    return {"quantized": weights}


def by_solving(out, size, block):
    """Each column is quantized as it is once the columns from it on have made up for all errors so far as well as they can."""
    original, h = 2 * randn(out, size, seed=1), hessian(size, seed=7)
    current, quantized = original.clone(), torch.zeros(out, size).double()
    for column in range(size):
        quantized[:, column] = by_row(current[:, column])
        left, errors = slice(column + 1, size), (original - quantized)[:, : column + 1]
        if column + 1 < size:
            best = torch.linalg.solve(h[left, left], h[left, : column + 1] @ errors.T)
            current[:, left] = original[:, left] + best.T
    return {"quantized": quantized}


def one_step(function, out, size):
    """After the first column, the others are those with the least error of the outputs."""
    weights = 2 * randn(out, size, seed=1)
    error = function(weights, 0, factor_of(size, seed=7), halves)
    return {"later columns": weights[:, 1:], "half the squared error of each row": error.square() / 2}


def least(out, size):
    weights, h = 2 * randn(out, size, seed=1), hessian(size, seed=7)
    off = weights[:, 0] - halves(weights[:, 0])
    left = weights[:, 1:] + torch.outer(off, torch.linalg.solve(h[1:, 1:], h[1:, 0]))
    change = torch.cat([off.unsqueeze(1), weights[:, 1:] - left], dim=1)
    return {"later columns": left, "half the squared error of each row": (change @ h * change).sum(1) / 2}


def given_sizes(function):
    sizes = {name: drawn(out, size, 1)() for name, out, size in (("first", 30, 40), ("240 rows", 240, 40), ("160 columns", 30, 160))}
    return cost(function, 3.3, 30 * 40 * 8, sizes)


def case(rung, title, given, expected=by_hand, source=HAND, observe=done, tolerance=1e-12, changes=("weights",)):
    return Case(rung, title, given, expected, source, observe, changes=changes, rtol=tolerance, atol=tolerance)


def example(title, given, error, weights, source="arithmetic"):
    return Case("worked example", title, given, answer(error, weights), source, of_example, changes=("weights",), rtol=1e-12, atol=1e-12)


TWO = [[1.0, -0.5], [0.0, 1.0]]
THREE = [[2.0, -1.0, 0.5], [0.0, 4.0, -2.0], [0.0, 0.0, 8.0]]
SIZES = {"out": 6, "size": 17}

CHECK = Check(
    exercise="10.gptq_column",
    outputs=("error",),
    spoilt=("error", "elements of weights"),
    cases=[
        Case("shape and dtype", "five rows, float32", drawn(5, 7, 2, dtype=torch.float32), by_hand, CONTRACT, done, changes=("weights",)),
        example("the contract's", of([[0.6, 0.6]], 0, TWO), [-0.4], [[1.0, 0.4]], CONTRACT),
        example("three columns: 0.75 / 2, which -1 and 0.5 spread", of([[1.25, 10.0, 20.0]], 0, THREE, torch.floor),
                [0.125], [[1.0, 10.125, 19.9375]]),
        example("the second column: 0.5 / 4; the first one stays", of([[9.25, 3.5, 20.0]], 1, THREE, torch.floor), [0.125],
                [[9.25, 3.0, 20.25]]),
        example("the last column: nobody is left to make up for it", of([[9.25, 8.5, 1.5]], 2, THREE, torch.floor), [0.0625],
                [[9.25, 8.5, 1.0]]),
        example("two rows, each with its own error", of([[0.5, 0.0], [-0.25, 0.0]], 0, TWO, torch.floor), [0.5, 0.75],
                [[0.0, 0.25], [-1.0, 0.375]]),
        example("a column that has such values already changes nothing", of([[3.0, 0.6, 0.7]], 0, THREE), [0.0], [[3.0, 0.6, 0.7]]),
        case("property", "the first of seven columns", drawn(5, 7, 0)),
        case("property", "one in the middle", drawn(5, 7, 3)),
        case("property", "the last", drawn(5, 7, 6)),
        case("property", "a single column", drawn(5, 1, 0)),
        case("property", "a single row", drawn(1, 7, 2)),
        case("property", "as many rows as columns", drawn(7, 7, 2)),
        case("property", "a step for each row, and limits", drawn(5, 7, 2, by_row)),
        case("property", "every value is allowed, and `quantize` returns what it was given", drawn(5, 7, 2, itself)),
        case("property", "the column has exactly the quantized values", drawn(40, 7, 2, by_row), of_column, CONTRACT, exact_column, 0.0),
        case("property", "... in float32, far outside of the limits", lambda: drawn(40, 7, 2, by_row, torch.float32)() | {
            "weights": (1e6 * randn(40, 7, seed=2)).float()}, of_column, CONTRACT, exact_column, 0.0),
        case("property", "earlier columns that are infinite stay so", lambda: drawn(3, 5, 2)() | {
            "weights": torch.cat([torch.full((3, 2), torch.inf).double(), randn(3, 3, seed=1)], dim=1)}),
        case("property", "a block of three columns within twelve", lambda: {"out": 5, "size": 12, "first": 4, "last": 7, "column": 1},
             part_by_hand, HAND, in_part),
        case("property", "float32", drawn(5, 7, 3, dtype=torch.float32), tolerance=1e-5),
        case("oracle", "after one column, the others have the least error", lambda: dict(SIZES), least, SOLVED, one_step, 1e-9),
        case("oracle", "every column of a matrix, one after the other", lambda: SIZES | {"block": 17}, by_solving, SOLVED, all_columns,
             1e-9),
        case("oracle", "... in blocks of four, whose errors go on to the columns behind", lambda: SIZES | {"block": 4}, by_solving, SOLVED,
             all_columns, 1e-9),
        case("budget", "more rows or columns, and memory, in tensors like `weights`", dict, lambda: within(3.3), CONTRACT, given_sizes),
    ],
)  # fmt: skip
