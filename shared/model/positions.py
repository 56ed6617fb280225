"""Chapter 02. Position bias on the attention scores: ALiBi and T5's relative positions.

Both add a number to the score of query i and key j that depends on j - i only, so both go on where training ended. ALiBi
(Press et al. 2021) has nothing to learn: a penalty proportional to the distance, with another slope for each head. T5
(Raffel et al. 2019, section 2.1) learns one number per head and group of distances.
"""

import math

import torch
from torch import Tensor, nn

from shared.model.config import ModelConfig


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    For other counts, the slopes of the largest power of two below, then every second one of twice that power
    (Press et al. 2021, section 3, and the authors' code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]


def alibi_bias(num_heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """[1, heads, Q, K] float32: -slope * |i - j| for query positions i [Q] and key positions j [K]."""
    distance = (keys[None, :] - queries[:, None]).abs()
    slopes = torch.tensor(alibi_slopes(num_heads), device=queries.device)
    return -(slopes[:, None, None] * distance).unsqueeze(0)


def relative_buckets(offsets: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The group of each offset: one per distance for short ones, logarithmically wider ones up to `max_distance`.

    Args:
        offsets: [...] int64, key position minus query position.
        num_buckets: groups in all; with `bidirectional`, half of them for keys after the query.
        max_distance: from here on all distances share the last group.

    Returns:
        [...] int64 in 0 .. num_buckets - 1.
    """
    first = torch.zeros_like(offsets)
    if bidirectional:
        num_buckets //= 2
        first = (offsets > 0) * num_buckets
        distance = offsets.abs()
    else:
        distance = (-offsets).clamp(min=0)
    exact = num_buckets // 2
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (octaves * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(distance < exact, distance, wide)


class RelativeBias(nn.Module):
    """T5's learned bias, one table for all blocks of a stack."""

    def __init__(self, config: ModelConfig, bidirectional: bool):
        super().__init__()
        self.buckets, self.max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.zeros(self.buckets, config.num_attention_heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[1, heads, Q, K] for query positions [Q] and key positions [K]."""
        offsets = keys[None, :] - queries[:, None]
        buckets = relative_buckets(offsets, self.buckets, self.max_distance, self.bidirectional)
        return nn.functional.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)
