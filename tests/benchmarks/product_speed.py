"""How fast float32 matrix products run through MKL, which `torch.mm` calls on a CPU, and through oneDNN, at the shapes of a training step.

    OMP_NUM_THREADS=1 python tests/benchmarks/product_speed.py

CPU time of one thread, which other work on the machine hardly changes; both in turn in one process. On an AMD processor MKL leaves AVX-512
unused, oneDNN does not. `torch.ops.mkldnn._linear_pointwise` is PyTorch's private door to oneDNN's product.
"""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import interval_rank
from step_speed import HIDDEN, PEERS, TOKENS, VOCAB
from torch import Tensor

PAIRS = 15


def onednn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")


def seconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    began = time.thread_time()
    product(a, b)
    return time.thread_time() - began


def main() -> None:
    torch.set_num_threads(1)
    inner = PEERS["llama"].intermediate_size
    table = Table("layer", "product", "MKL, GFLOP/s", "oneDNN, GFLOP/s", "ratio (95 %)", title=f"one thread, torch {torch.__version__}")
    layers = {"q, k, v, o": (HIDDEN, HIDDEN), "gate, up": (HIDDEN, inner), "down": (inner, HIDDEN), "head": (HIDDEN, VOCAB)}
    for layer, (rows, columns) in layers.items():
        x, weight, gradient = torch.randn(TOKENS, rows), torch.randn(columns, rows), torch.randn(TOKENS, columns)
        for name, a, b in (("forward", x, weight.T), ("of x", gradient, weight), ("of the weight", gradient.T, x)):
            torch.testing.assert_close(onednn(a, b), torch.mm(a, b), rtol=1e-4, atol=1e-2)
            times = [(seconds(torch.mm, a, b), seconds(onednn, a, b)) for _ in range(PAIRS + 2)][2:]
            ratios, rank = sorted(mkl / other for mkl, other in times), interval_rank(PAIRS)
            speeds = (f"{2e-9 * TOKENS * rows * columns / statistics.median(column):.0f}" for column in zip(*times, strict=True))
            table.add_row(layer, name, *speeds, f"{statistics.median(ratios):.2f} ({ratios[rank - 1]:.2f} to {ratios[-rank]:.2f})")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
