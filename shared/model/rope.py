"""Chapter 02. Positional encodings: RoPE (rotary position embedding), ALiBi and T5's relative position bias.

RoPE rotates queries and keys by angles that grow with the position: a pair of dimensions (x1, x2) at position p by p * frequency
(Su et al. 2021, section 3.4.2). The product of a query and a key then depends on the difference of their positions only. Dimension i is
paired with i + d/2 ("half-rotated", as Hugging Face stores weights); Meta's original files pair 2i with 2i + 1, which is another order of
the same rows.

Tables are computed in float32 once per forward pass: there is no buffer that a change of device or dtype could spoil.

ALiBi and T5 add a number to the score of query i and key j that depends on j - i only, so both extrapolate beyond the length of training.
ALiBi (Press et al. 2021) has nothing to learn: a penalty proportional to the distance, with another slope for each head. T5 (Raffel et al.
2019, section 2.1) learns one number per head and group of distances.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.config import ModelConfig, RopeScaling


@exercise("02.apply_rope")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its position's angle: RoPE (Su et al. 2021, equation 34), in the half-rotated layout.

    A pair is a point in the plane, and is turned from the first axis towards the second. An angle with cosine c and sine s takes (1, 0) to
    (c, s), and (0, 1) to (-s, c); any other pair is a sum of these two. Pair i has the angle of cos[..., i] and sin[..., i].

    Args:
        x: [batch, heads, seq, d], any floating dtype; d is even. Left unchanged.
        cos, sin: [seq, d/2], or [batch, 1, seq, d/2] where rows have positions of their own. float32.

    Returns:
        [batch, heads, seq, d] in the dtype of `x`. The rotation is computed in float32 (float64 for float64 input).

    >>> x = torch.tensor([[[[1.0, 2.0, 0.0, 0.0]]]])               # pairs (1, 0) and (2, 0)
    >>> quarter, none = torch.tensor(0.0), torch.tensor(1.0)       # a quarter turn, no turn
    >>> apply_rope(x, torch.stack([quarter, none])[None], torch.stack([none, quarter])[None])
    tensor([[[[0., 2., 1., 0.]]]])
    """


class RopeTables(NamedTuple):
    """cos and sin of each position's angles: [seq, head_dim / 2] or [batch, 1, seq, head_dim / 2], float32."""

    cos: Tensor
    sin: Tensor


def rope_tables(config: ModelConfig, positions: Tensor, length: int) -> RopeTables:
    """The tables for `positions`.

    Args:
        config: a resolved configuration with position "rope".
        positions: [seq] or [batch, seq] int64.
        length: the length of the whole sequence; dynamic scaling depends on it.
    """
    frequencies, magnitude = rope_frequencies(config, length, positions.device)
    angles = positions.unsqueeze(-1).float() * frequencies
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)  # one table for all heads
    return RopeTables(angles.cos() * magnitude, angles.sin() * magnitude)


def rope_frequencies(config: ModelConfig, length: int, device: torch.device | None = None) -> tuple[Tensor, float]:
    """[head_dim / 2] float32, radians per position, and a factor for cos and sin (1 except for yarn)."""
    scaling, size = config.rope_scaling, config.head_dim
    theta = config.rope_theta
    if scaling and scaling.rope_type == "dynamic":
        theta = dynamic_theta(config, scaling, length)
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size)
    if scaling and scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling and scaling.rope_type == "llama3":
        return llama3_frequencies(frequencies, scaling), 1.0
    if scaling and scaling.rope_type == "yarn":
        return yarn_frequencies(frequencies, config, scaling)
    return frequencies, 1.0


def dynamic_theta(config: ModelConfig, scaling: RopeScaling, length: int) -> float:
    """A larger base for a longer sequence, so that the slowest dimension interpolates and the fastest does not change.

    From max_position_embeddings on, theta' = theta * (factor * length / max - (factor - 1)) ** (d / (d - 2)). Each forward
    pass is taken by its own length; Hugging Face also remembers the longest sequence that it has seen.
    """
    longest = config.max_position_embeddings
    growth = scaling.factor * max(length, longest) / longest - (scaling.factor - 1)
    return config.rope_theta * growth ** (config.head_dim / (config.head_dim - 2))


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths stretched by the factor, short ones left alone, a linear blend in frequency between the two."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def yarn_frequencies(frequencies: Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Peng et al. 2023, section 3.2: the blend is linear in the dimension's index instead, and attention is sharpened."""

    def dimension(turns: float) -> float:
        """The index of the dimension that turns this often over the original context."""
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    first = max(math.floor(dimension(scaling.beta_fast)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    index = torch.arange(len(frequencies), device=frequencies.device).float()
    stretched = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    blended = frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
    magnitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return blended, magnitude


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
