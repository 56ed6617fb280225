"""GPTQ of one layer in blocks beside column by column over the whole matrix, and the products of a quantized layer beside plain ones.

    OMP_NUM_THREADS=1 python tests/benchmarks/quantization_speed.py

CPU time of one thread, which other work on the machine changes less than the clock; contenders in turn in one process. Column by column,
the same function has one block as wide as the matrix: each column's error is spread over all columns that follow at once.
"""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import interval_rank
from torch import Tensor

from shared.finetune.quantization.gptq import GPTQ, Hessian, quantize_gptq
from shared.finetune.quantization.packed import QuantizedLinear, dynamic_kernel, fused_kernel
from shared.finetune.quantization.rounding import Rounding, round_to_nearest

PAIRS = 7
WIDTH = 2048
TOKENS = (1, 16, 256)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def gptq_table() -> Table:
    table = Table("layer", "in blocks of 128, s", "column by column, s", "ratio (95 %)", title="GPTQ, INT4 in groups of 128")
    for rows, columns in ((1024, 1024), (WIDTH, WIDTH)):
        generator = torch.Generator().manual_seed(0)
        weight, hessian = torch.randn(rows, columns, generator=generator), Hessian(columns)
        hessian.add(torch.randn(2 * columns, columns, generator=generator) @ torch.randn(columns, columns, generator=generator))
        hessian = hessian.value()
        blocked, whole = (GPTQ(Rounding(4, 128), block=block) for block in (128, columns))
        ours, theirs = (quantize_gptq(weight, hessian, settings).codes for settings in (blocked, whole))
        assert (ours != theirs).float().mean() < 0.01  # sums in another order: single codes flip, and move what follows
        times = [(cpu_seconds(lambda: quantize_gptq(weight, hessian, blocked)), cpu_seconds(lambda: quantize_gptq(weight, hessian, whole)))
                 for _ in range(PAIRS)]  # fmt: skip
        ratios, rank = sorted(slow / fast for fast, slow in times), interval_rank(PAIRS)
        medians = (f"{statistics.median(column):.2f}" for column in zip(*times, strict=True))
        table.add_row(f"{rows} x {columns}", *medians, f"{statistics.median(ratios):.1f} ({ratios[rank - 1]:.1f} to {ratios[-rank]:.1f})")
    return table


def products() -> dict[str, Callable[[Tensor], Tensor]]:
    """Name -> x [tokens, in] to [tokens, out]."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    narrow = weight.to(torch.bfloat16)
    int4, int8 = Rounding(4, 128, symmetric=False), Rounding(8, None)
    four, eight = (QuantizedLinear.of(round_to_nearest(weight, rounding), None, rounding) for rounding in (int4, int8))
    return {
        "float32": lambda x: x @ weight.T,
        "bfloat16": lambda x: x.to(torch.bfloat16) @ narrow.T,
        "INT4, reference path": four,
        "INT4, fused kernel": fused_kernel(four),
        "INT8, reference path": eight,
        "INT8, fused kernel": fused_kernel(eight),
        "INT8, activations too": dynamic_kernel(eight),
    }


def product_table() -> Table:
    title = f"a layer of {WIDTH} x {WIDTH}, milliseconds of CPU time"
    table = Table("product", *(f"{tokens} token{'s' * (tokens > 1)}" for tokens in TOKENS), title=title)
    contenders = products()
    times: dict[str, list[str]] = {name: [] for name in contenders}
    with torch.no_grad():
        for tokens in TOKENS:
            x = torch.randn(tokens, WIDTH)
            rounds = [
                {name: cpu_seconds(lambda product=product, x=x: product(x)) for name, product in contenders.items()}
                for _ in range(PAIRS + 2)
            ]
            for name, row in times.items():
                row.append(f"{1e3 * statistics.median(each[name] for each in rounds[2:]):.2f}")
    for name, row in times.items():
        table.add_row(name, *row)
    return table


def main() -> None:
    torch.set_num_threads(1)
    console = Console(width=150)
    console.print(product_table())
    console.print(gptq_table())


if __name__ == "__main__":
    main()
