"""Chapter 04. FLOPs per token, the peak FLOP/s of devices, and the quotient: model FLOPs utilisation (MFU).

A matrix of n numbers that a token passes costs 2n operations forward (a product and a sum each) and 4n backward: 6n. Attention
adds the two products that have no weights, of queries with keys and of attention weights with values. What is left, norms,
activations, the softmax, the optimizer, is small and by convention not counted (Chowdhery et al. 2022, PaLM, appendix B).

    MFU = FLOPs per token * tokens per second / peak FLOP/s       (Chowdhery et al. 2022, PaLM, section 4.1)

A wrong peak makes every utilisation wrong by the same factor, which is easily missed. So there is one table, for dense products (without
the doubling for 2:4 sparsity) that accumulate in float32, as in training; a device that is not in it is an error, not a guess. Vendors
publish no such number for CPUs, whose clock varies with the load, so a CPU's peak is measured.

Left out on purpose: recomputation. Activation checkpointing costs time and no *model* FLOPs, so the utilisation shows its price. And
memory bandwidth, the other roof of the roofline.
"""

import re
import time
from dataclasses import dataclass, replace
from functools import cache

import torch

from shared.course.binding import exercise
from shared.course.errors import CourseError
from shared.model.config import ModelConfig
from shared.model.counting import active_feed_forward_size


@exercise("04.flops_per_token")
def flops_per_token(config: ModelConfig, seq: int) -> int:
    """Floating-point operations of one token's training step, forward and backward, in matrix products.

        6 * (numbers in the matrices that the token passes) + 12 * layers * heads * head_dim * seq

    The matrices are those of attention (queries [D, H * d], keys and values [D, K * d] each, output [H * d, D]), of the
    feed-forward layers (two, or three where it is gated) and of the head ([D, vocab]; where `head` is mlm, a
    [D, D] before it). The look-up in the embedding is no product, though a tied head is one. All seq^2 scores are counted, as the
    convention has it, although causal attention needs half.

    Args:
        config: a decoder, or an encoder (bidirectional). Resolved or not.
        seq: tokens in a sequence.

    Raises:
        ValueError: an encoder-decoder, whose two sides see different lengths, or a seq below 1.

    >>> gpt2 = ModelConfig(vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, gated=False)
    >>> flops_per_token(gpt2, 1024) == 6 * (12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 50257) + 12 * 12 * 768 * 1024
    True
    """


def model_flops_per_token(config: ModelConfig, seq: int) -> int:
    """`flops_per_token` of any model: of experts (chapter 09) only those are counted that a token passes, layer by layer."""
    dense = replace(config, experts=None)
    flops = flops_per_token(dense, seq)
    if config.experts is None:
        return flops
    sparse, dense = config.resolved(), dense.resolved()
    more = (active_feed_forward_size(sparse, layer) - active_feed_forward_size(dense, layer) for layer in range(dense.num_hidden_layers))
    return flops + 6 * sum(more)


SMALL = 128  # of the square matrices that tell how long larger ones take


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device for dense matrix products.

    half: bfloat16 and float16 with float32 accumulation. tf32: float32 on tensor cores.
    """

    float32: float
    tf32: float
    half: float


# What `torch.cuda.get_device_name()` says, as a regular expression for the whole of it -> the peak at boost clock.
PEAKS = {
    # NVIDIA, "Ampere GA102 GPU Architecture" white paper, table 9 (GeForce RTX 3090). With float16 accumulation it would be 142.
    r"NVIDIA GeForce RTX 3090": Peak(35.6e12, 35.6e12, 71e12),
    # NVIDIA, "Ada GPU Architecture" white paper, appendix A (GeForce RTX 4090).
    r"NVIDIA GeForce RTX 4090": Peak(82.6e12, 82.6e12, 165.2e12),
    # NVIDIA, "A100 Tensor Core GPU Architecture" white paper, table 1. The same for 40 and 80 GB, SXM and PCIe.
    r"(NVIDIA )?A100[- ](SXM4-|PCIE-)?\d+GB( PCIe)?": Peak(19.5e12, 156e12, 312e12),
    # NVIDIA, "H100 Tensor Core GPU Architecture" white paper, table 2: SXM5 and PCIe.
    r"NVIDIA H100( \d+GB HBM3)?": Peak(66.9e12, 494.7e12, 989.4e12),
    r"NVIDIA H100 PCIe": Peak(51.2e12, 378e12, 756e12),
    # NVIDIA, H200 data sheet (SXM): the H100's processor with other memory. The sheet's 1,979 is with sparsity.
    r"NVIDIA H200": Peak(66.9e12, 494.7e12, 989.4e12),
}


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops: float) -> float:
    """Model FLOPs utilisation (MFU), from 0 to 1. With several devices, `peak_flops` is the sum over them.

    >>> round(mfu(6 * 125_000_000, 40_000, 71e12), 3)
    0.423
    """
    return flops_per_token * tokens_per_second / peak_flops


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The peak FLOP/s of one device for matrix products in `dtype`. A CPU's is measured, which takes half a second.

    float32 on a GPU counts as TF32 where torch may use it (`torch.set_float32_matmul_precision`).

    Raises:
        CourseError: the device is not in the table, or models are not trained in the dtype.
    """
    device = torch.device(device)
    if device.type == "cpu" and dtype == torch.float16:
        raise CourseError("A CPU has no fast float16 matrix products, so it has no meaningful peak: train in float32 or bfloat16 there.")
    if device.type == "cpu":
        return cpu_peak(dtype)
    if device.type != "cuda":
        raise CourseError(f"No peak FLOP/s are known for a device of type {device.type}: give peak_flops from its maker's data sheet.")
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """The table's peak FLOP/s of a GPU, by the name that its driver reports."""
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, name):
            return peak_for_dtype(peak, dtype, tf32)
    raise CourseError(
        f"The peak FLOP/s of {name!r} are not in shared/engine/metrics/flops.py, and a guess would make every utilisation wrong: "
        "give peak_flops from its maker's data sheet (dense, with float32 accumulation)."
    )


def peak_for_dtype(peak: Peak, dtype: torch.dtype, tf32: bool) -> float:
    if dtype in (torch.bfloat16, torch.float16):
        return peak.half
    if dtype == torch.float32:
        return peak.tf32 if tf32 else peak.float32
    raise CourseError(f"There is no peak for {dtype}: choose float32, bfloat16 or float16.")


@cache
def cpu_peak(dtype: torch.dtype) -> float:
    """The peak FLOP/s of this CPU, measured once in a process: what it decides, such as a precision, and MFU then agree on one value."""
    return measure_peak(dtype)


def measure_peak(dtype: torch.dtype, size: int = 1024, repeats: int = 7, at_least: float = 0.4, at_most: float = 0.7) -> float:
    """Measure the peak FLOP/s of this CPU: the fastest of several products of two square matrices, 2 size^3 / seconds.

    The fastest, because other programs can only make a product slower; and at least `repeats` products and `at_least` seconds, because
    another program may occupy the CPU for a shorter time. Measure once, and keep the value.

    Args:
        size: of the matrices; smaller ones are taken where a product would last too long, as bfloat16 does on a CPU without it.
        at_most: seconds after which no further product begins.
    """
    began = time.perf_counter()
    if size > SMALL:
        small = matrices(dtype, SMALL)
        timed_product(*small)
        while size > SMALL and timed_product(*small) * (size / SMALL) ** 3 > at_most / 4:
            size //= 2
    large = matrices(dtype, size)
    timed_product(*large)  # the first one prepares kernels and memory
    seconds = [timed_product(*large)]
    while (len(seconds) < repeats or sum(seconds) < at_least) and time.perf_counter() - began < at_most:
        seconds.append(timed_product(*large))
    return 2 * size**3 / min(seconds)


def matrices(dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two square matrices of random numbers, and room for their product."""
    left, right = (torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    return left, right, torch.empty(size, size, dtype=dtype)


def timed_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Seconds of one product."""
    began = time.perf_counter()
    torch.mm(left, right, out=out)
    return time.perf_counter() - began
