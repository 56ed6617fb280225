"""CPU seconds of NF4 here and in bitsandbytes, on one thread of a CPU, in alternating pairs: medians, and the median of the ratios.

python tests/benchmarks/nf4_speed.py [pairs]
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from shared.finetune.quantization.nf4 import BLOCK, dequantize_nf4, nf4_values, quantize_nf4  # noqa: E402
from shared.finetune.quantization.nf4_linear import Nf4Linear  # noqa: E402

SIZE, TOKENS = 2048, 512
VALUES = nf4_values()


def operations(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """(what, ours, theirs)."""
    import bitsandbytes
    from bitsandbytes import functional

    weight = torch.randn(SIZE, SIZE) * 0.02
    yield "quantize", lambda: quantize_nf4(weight, VALUES, BLOCK), lambda: functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, scales = quantize_nf4(weight, VALUES, BLOCK)
    their_codes, state = functional.quantize_4bit(weight.to(dtype), blocksize=64, quant_type="nf4")
    yield (
        "dequantize",
        lambda: dequantize_nf4(codes, scales, VALUES, BLOCK, weight.shape, dtype),
        lambda: functional.dequantize_4bit(their_codes, state),
    )
    mine = Nf4Linear.of("weight", nn.Parameter(weight), None)
    theirs = bitsandbytes.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=dtype, quant_type="nf4")
    theirs.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
    theirs = theirs.to("cpu")
    x, upstream = torch.randn(TOKENS, SIZE, dtype=dtype, requires_grad=True), torch.randn(TOKENS, SIZE, dtype=dtype)
    yield "linear layer, forward and backward", lambda: mine(x).backward(upstream), lambda: theirs(x).backward(upstream)
    plain = mine.dequantized(dtype)
    yield "the same, and a plain frozen layer", lambda: mine(x).backward(upstream), lambda: (x @ plain.T).backward(upstream)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main(pairs: int) -> None:
    print("| dtype | what | ms here | ms there | there / here |", "|---|---|---|---|---|", sep="\n")
    for dtype in (torch.float32, torch.bfloat16):
        for what, ours, theirs in operations(dtype):
            ours(), theirs()
            found = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
            here, there = (1000 * statistics.median(column) for column in zip(*found, strict=True))
            ratio = statistics.median(b / a for a, b in found)
            print(f"| {str(dtype).removeprefix('torch.')} | {what} | {here:.1f} | {there:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
