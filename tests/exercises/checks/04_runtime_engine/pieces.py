"""What the checks of chapter 04 share: random tensors, drawn in float64 and rounded to the dtype that a case wants."""

import torch
from torch import Tensor


def randn(*shape: int, seed: int, dtype=torch.float64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
