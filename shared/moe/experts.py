"""Chapter 09. Experts as batched matrices [E, out, in], computed by a loop, by batched products, or by grouped products (grouped GEMM).

The rows come sorted by expert. A loop makes one product for each expert. Batched products pad every expert's rows to the longest and
are one `bmm`. Grouped products take the rows as they are, with the ends of the experts' parts (`torch.nn.functional.grouped_mm`). The
three agree to rounding; an expert without rows gets a gradient of zero. `grouped_mm` leaves rows past the last end as the memory was, in
its result and in its gradient, so every row that comes in belongs to an expert.

`Experts` is all that expert parallelism replaces: called as experts(rows, counts), it returns a result for each row, which `arrived`
makes readable.
"""

import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.model.config import ModelConfig
from shared.model.context import to_compute_dtype
from shared.model.feed_forward import ACTIVATIONS, swiglu
from shared.parallel.pipeline.weight_gradients import Product, Waiting, split_product

ALIGNMENT = 16  # bytes by which `grouped_mm` wants rows to start
BLOCK = 32  # rows, of which each expert gets a multiple where oneDNN compiles a kernel for each new number
FEWEST_ROWS = 4 * BLOCK  # of an expert on average: smaller numbers recur by themselves, and blocks would be much of the work


def loop_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One product for each expert. `unbind` has one backward pass for all; an index for each would make E gradients of full size."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])


def batched_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One batched product [E, longest, in] x [E, in, out], where every expert's rows are padded to the number of the fullest expert's."""
    longest = int(counts.max())
    expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(rows))
    starts = counts.cumsum(0) - counts
    places = expert * longest + torch.arange(len(rows), device=rows.device) - starts[expert]
    padded = rows.new_zeros(len(counts) * longest, rows.shape[1]).index_copy(0, places, rows)
    return torch.bmm(padded.unflatten(0, (len(counts), longest)), weight.transpose(1, 2)).flatten(0, 1)[places]


@cache
def processor_is_amds() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


class OneDNNProduct(torch.autograd.Function):
    """`loop_product` by oneDNN, for float32 on an AMD processor. PyTorch's own products call MKL, which leaves AVX-512 unused there
    (`tests/benchmarks/README.md`); `Tensor.to_mkldnn` is the public way to oneDNN. Its copies are made again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        parts = zip(rows.tensor_split(ends[:-1].tolist()), weight, strict=True)
        return torch.cat([F.linear(part.to_mkldnn(), matrix).to_dense() for part, matrix in parts if len(part)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        of_rows, of_weight = [], torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        parts = zip(rows.tensor_split(ends[:-1].tolist()), upstream.tensor_split(ends[:-1].tolist()), strict=True)
        for expert, (part, gradient) in enumerate(parts):
            if len(part):
                own = gradient.to_mkldnn()
                if ctx.needs_input_grad[0]:
                    of_rows.append(F.linear(own, weight[expert].T).to_dense())
                if of_weight is not None:
                    of_weight[expert] = F.linear(own.transpose(0, 1), part.T).to_dense()
        return torch.cat(of_rows) if of_rows else None, of_weight, None


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """PyTorch's grouped product; oneDNN's in float32 on an AMD processor; a loop where neither has a kernel: in float64, and for rows that
    are not a multiple of 16 bytes long."""
    rows, weight = to_compute_dtype(rows), to_compute_dtype(weight)
    in_float32 = rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    ends = counts.cumsum(0).to(torch.int32)
    if in_float32 and processor_is_amds() and len(rows) and not torch.compiler.is_compiling():
        return OneDNNProduct.apply(rows, weight, ends)
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    if not aligned or rows.dtype == torch.float64 or not len(rows):
        return loop_product(rows, weight, counts)
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def in_blocks(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each expert's rows with zeros to a multiple of `BLOCK`.

    For a product in bfloat16 or float16, oneDNN compiles a kernel for each number of rows that it has not seen. Experts' counts are new in
    every step, and compiling takes 2 ms where the product takes 0.3 (`tests/benchmarks/README.md`). With blocks the numbers recur.

    Returns:
        Padded rows [m, D], padded counts [E] that add up to m, and the place [n] of each row among them.
    """
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    zeros_before = (padded - counts).cumsum(0) - (padded - counts)
    places = torch.arange(len(rows)) + zeros_before.repeat_interleave(counts, output_size=len(rows))
    return rows.new_zeros(int(padded.sum()), rows.shape[1]).index_copy(0, places, rows), padded, places


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loop": loop_product,
    "batched": batched_product,
    "grouped": grouped_product,
}


class ExpertLinear(nn.Module):
    """E linear layers without biases: rows [n, in] sorted by expert -> [n, out]. weight: [E, out, in]."""

    knows_tensor_parallelism = True  # which cuts it as it would cut each of the E

    def __init__(self, num_experts: int, in_features: int, out_features: int, implementation: str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.product = PRODUCTS[implementation]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.product(rows, self.weight, counts)

    def split_backward(self, waiting: Waiting) -> None:
        """Leave weight gradients in a list, to be computed later (`shared.parallel.pipeline.weight_gradients`)."""
        product = self.product

        def split(rows: Tensor, weight: nn.Parameter, counts: Tensor) -> Tensor:
            def to_weight(rows: Tensor, upstream: Tensor) -> Tensor:
                parts = (part.to(upstream.dtype).split(counts.tolist()) for part in (upstream, rows))
                return torch.stack([gradient.T @ part for gradient, part in zip(*parts, strict=True)])

            def to_input(upstream: Tensor, weight: Tensor) -> Tensor:
                return product(upstream, weight.transpose(1, 2), counts)

            return split_product(rows, weight, Product(partial(product, counts=counts), to_input, to_weight), waiting)

        self.product = split


class Experts(nn.Module):
    """The feed-forward layers of E experts: rows [n, D] sorted by expert, counts [E] that add up to n -> [n, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, size, width = config.experts, config.hidden_size, config.experts.moe_intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.up_proj = ExpertLinear(experts.num_experts, size, width, experts.implementation)
        self.down_proj = ExpertLinear(experts.num_experts, width, size, experts.implementation)
        self.gate_proj = ExpertLinear(experts.num_experts, size, width, experts.implementation) if config.gated else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        rows = to_compute_dtype(rows)
        compiles_kernels = rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16)
        if compiles_kernels and len(rows) >= FEWEST_ROWS * len(counts) and not torch.compiler.is_compiling():
            rows, counts, places = in_blocks(rows, counts)
            return self.feed_forward(rows, counts).index_select(0, places)
        return self.feed_forward(rows, counts)

    def feed_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = partial(self.up_proj, counts=counts), partial(self.down_proj, counts=counts)
        if self.gate_proj is None:
            return down(self.activation(up(rows)))
        return swiglu(rows, partial(self.gate_proj, counts=counts), up, down, self.activation)

    def arrived(self, rows: Tensor) -> Tensor:
        """What `forward` returned, once it may be read: with experts on other ranks it is still on its way."""
        return rows
