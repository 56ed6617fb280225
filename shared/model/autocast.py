"""Chapter 02. Mixed precision, as far as the model has to know of it: what several layers read is cast once."""

import torch
from torch import Tensor


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that linear layers would cast it to under autocast; unchanged without.

    Each linear layer casts its own input. Queries, keys and values come from one tensor, gate and up from another: casting
    before them gives the same numbers once instead of three times, and keeps one copy for the backward pass.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
