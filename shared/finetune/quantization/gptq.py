"""Chapter 10. GPTQ: quantize a matrix column by column, and let the columns that are still to come make up for the error.

Frantar et al. (2022), "GPTQ", algorithm 1, after Optimal Brain Surgeon: the error that is minimised is that of the layer's outputs on
calibration inputs, |X (W - Q)^T|^2, whose Hessian for each row of W is H = 2 X^T X.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.course.bounds import NonNegativeFloat, PositiveInt, checked
from shared.finetune.quantization.rounding import QuantizedWeight, Rounding, decode, require_groups


@exercise("10.gptq_column")
def gptq_column(weights: Tensor, column: int, factor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantize one column of a block of weights, and spread its error over the columns after it (Frantar et al. 2022, algorithm 1).

    Column j becomes what it is rounded to. Of all moves of the later columns, the one is made with which the layer's outputs change least:
    the sum of their squared changes over the calibration inputs is as small as it can be with this column j. No system is solved for it,
    because the upper triangular factor U of the inverse Hessian, H^-1 = U^T U, holds the moves in its row j.

    Args:
        weights: [out, n], the columns of the block, with the errors of earlier columns spread over them already. It may be a part of a
            larger matrix. Changed in place: column j becomes exactly its quantized values, later columns take over its error, all at
            once, and earlier ones stay.
        column: j, from 0.
        factor: [n, n], U: upper triangular, with a positive diagonal. Not the inverse itself.
        quantize: [out] -> [out], rounds a column to the values that it may have; called once, with column j as it is.

    Returns:
        What column j lost by the rounding, in units of U_jj, [out]: columns outside of the block need it.

    >>> weights, factor = torch.tensor([[0.6, 0.6]]), torch.tensor([[1.0, -0.5], [0.0, 1.0]])
    >>> gptq_column(weights, 0, factor, torch.round), weights
    (tensor([-0.4000]), tensor([[1.0000, 0.4000]]))
    """


@dataclass(frozen=True)
@checked
class GPTQ:
    """Settings of GPTQ.

    Args:
        rounding: bits and groups.
        damping: share of the Hessian's mean diagonal that is added to its diagonal.
        act_order: quantize the columns with the largest inputs first. Groups stay those of neighbouring columns, and their scales are
            then taken from the weights as they were ("static groups"); otherwise from the weights as updated when a group begins.
        block: columns whose updates of later columns are made in one product.
    """

    rounding: Rounding = Rounding()
    damping: NonNegativeFloat = 0.01
    act_order: bool = False
    block: PositiveInt = 128


class Hessian:
    """H = 2 X^T X / n, added up over batches of a layer's inputs in float32 (float64 for float64 inputs). [features, features]."""

    def __init__(self, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.products, self.rows = torch.zeros(features, features, dtype=dtype, device=device), 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [rows, features]."""
        inputs = inputs.to(self.products.dtype)
        self.products.addmm_(inputs.t(), inputs)
        self.rows += len(inputs)

    def value(self) -> Tensor:
        return self.products * (2 / max(self.rows, 1))


def quantize_gptq(weight: Tensor, hessian: Tensor, settings: GPTQ, name: str = "the layer") -> QuantizedWeight:
    """Quantize a weight so that its layer's outputs on the calibration inputs change little (Frantar et al. 2022, algorithm 1).

    Within a block of columns each error is spread over the block at once (`gptq_column`); the columns after the block get the errors of the
    whole block in one product. The result does not depend on the size of the blocks, except for rounding. Columns whose inputs are always
    0 are set to 0.

    Args:
        weight: [out, in]; left unchanged.
        hessian: [in, in], `Hessian.value()`; left unchanged. Its dtype is computed in.
        name: of the layer, for errors.

    Raises:
        ValueError: a Hessian of zeros, which would make this rounding to nearest, one that is not finite, or one that cannot be factorised;
            what `round_to_nearest` refuses.
    """
    rounding, columns = settings.rounding, weight.shape[1]
    width = rounding.columns(columns)
    require_groups(weight, width)
    hessian, dead = conditioned(hessian, settings.damping, name)
    work = weight.to(hessian.dtype, copy=True)
    work[:, dead] = 0
    scales, zeros = (torch.zeros(len(work), columns // width, dtype=work.dtype, device=work.device) for _ in range(2))
    order = torch.arange(columns, device=work.device)
    if settings.act_order:
        scales, zeros = rounding.scales(work.unflatten(1, (-1, width)))
        order = hessian.diagonal().argsort(descending=True, stable=True)
        work, hessian = work[:, order], hessian[order][:, order]
    factor = inverse_factor(hessian, name)
    groups = (order // width).tolist()
    codes = torch.empty_like(work, dtype=torch.uint8)
    for start, stop in blocks(columns, settings.block, width):
        errors, within = torch.empty_like(work[:, start:stop]), factor[start:stop, start:stop]
        for column in range(start, stop):
            group = groups[column]
            if not settings.act_order and column % width == 0:
                scales[:, group], zeros[:, group] = rounding.scales(work[:, column : column + width])

            def quantize(values: Tensor, column: int = column, group: int = group) -> Tensor:
                codes[:, column] = rounding.encode(values, scales[:, group], zeros[:, group])
                return decode(codes[:, column], scales[:, group], zeros[:, group])

            errors[:, column - start] = gptq_column(work[:, start:stop], column - start, within, quantize)
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    in_place = torch.empty_like(codes)
    in_place[:, order] = codes
    return QuantizedWeight(in_place, scales.to(weight.dtype), zeros.to(weight.dtype))


def conditioned(hessian: Tensor, damping: float, name: str) -> tuple[Tensor, Tensor]:
    """The damped Hessian, in which a dead column has the diagonal 1, and which columns are dead: [in] bool."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    if dead.all():
        raise ValueError(
            f"The Hessian of {name} is zero: no calibration input reached it, and without one GPTQ would be rounding to nearest. "
            "Calibrate with text that runs through this layer."
        )
    if not hessian.isfinite().all():
        raise ValueError(f"The Hessian of {name} is not finite: its calibration inputs overflow. Calibrate the model in float32.")
    hessian = hessian + torch.diag(torch.where(dead, 1, damping * diagonal.mean()))
    return hessian, dead


def inverse_factor(hessian: Tensor, name: str) -> Tensor:
    """U, upper triangular with H^-1 = U^T U. With H = R R^T for an upper triangular R, it is R^-1, so no inverse of H is made."""
    flipped, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if failed:
        raise ValueError(
            f"The Hessian of {name} cannot be factorised: its inputs depend on one another. Give more calibration text or a larger damping."
        )
    factor = flipped.flip(0, 1)
    return torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=factor.dtype, device=factor.device), upper=True)


def blocks(columns: int, block: int, width: int) -> list[tuple[int, int]]:
    """Start and stop of blocks of columns. A group of `width` columns lies within a block or begins with one, because its scales are taken
    from columns that have received all earlier errors."""
    span = max(width, block - block % width)
    firsts = (first for start in range(0, columns, span) for first in range(start, min(start + span, columns), block))
    starts = [*firsts, columns]
    return list(zip(starts, starts[1:], strict=False))


def output_error(change: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """|X change^T|^2 / |X weight^T|^2 on the calibration inputs: the share of a layer's outputs that its quantization changes."""
    change, weight = change.to(hessian.dtype), weight.to(hessian.dtype)
    return (((change @ hessian) * change).sum() / ((weight @ hessian) * weight).sum()).item()
