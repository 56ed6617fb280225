"""Tensors for comparisons, and how far two lists of them are apart."""

import torch


def randn(*shape: int, seed: int, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def largest_difference(left, right) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))
