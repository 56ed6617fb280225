"""Chapter 09. Dispatch and combine: tokens sorted by expert, so that each expert's tokens lie together, and back to their places.

A token that chose k experts has k choices, each of which becomes a row. A stable sort by expert keeps the tokens of an expert in their
order; no loop runs over tokens.

    tokens   0: experts 2, 0     1: experts 0, 1          (k = 2)
    choices  2 0 0 1   ->   order 1 2 3 0 (experts 0 0 1 2), counts 2 1 1   ->   rows of tokens 0, 1, 1, 0

With a capacity, an expert takes a limited number of a row's choices (Lepikhin et al. 2020, GShard, section 2.2): later ones, by position,
are dropped, and the token passes by on the residual stream alone. The limit is counted row by row and by position, so no other row and
no later token changes what is kept: micro-batches and ranks change nothing, and a causal model stays causal.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from shared.course.binding import exercise


@exercise("09.dispatch")
def dispatch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort all choices by expert: first the choices of expert 0 in the order of their tokens, then the choices of expert 1, up to the last.

    Choices of the same expert stay in the order of their numbers on every device, because all ranks must find the same order.

    No loop runs over tokens or experts, and memory grows with the number of choices, not with choices times experts.

    Args:
        experts: [tokens, k] int64, the expert of each choice; `num_experts` for one that is dropped.
        num_experts: E.

    Returns:
        order: [tokens * k] int64, the numbers of the choices (token * k + place) in the order of their experts, dropped ones last.
        counts: [E] int64, how many choices each expert has; the dropped ones are not counted.

    >>> dispatch(torch.tensor([[2, 0], [0, 1]]), num_experts=4)
    (tensor([1, 2, 3, 0]), tensor([2, 1, 1, 0]))
    """


@exercise("09.combine")
def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Each token's sum of what its experts made of it, weighted by the router.

    No loop runs over tokens, and no more is held at a time than a few tensors of the size of `rows`.

    Args:
        rows: [tokens * k, D], in the order of `dispatch`; 0 for dropped choices. There may be no tokens.
        order: [tokens * k] int64, as `dispatch` returned it.
        weights: [tokens, k].

    Returns:
        [tokens, D] in the dtype of `rows`; multiplied and added up in the wider of the two dtypes. It has a gradient to `rows` and to
        `weights`.

    >>> combine(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]), torch.tensor([1, 2, 3, 0]), torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    tensor([[500.5000],
            [ 19.0000]])
    """


def drop_beyond_capacity(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Replace choices beyond an expert's capacity in their row by `num_experts`.

    Args:
        experts: [batch, seq, k] int64.
        num_experts: E.
        capacity: how many choices of a row an expert takes: the first ones by position, then by place among a token's k.

    Returns:
        [batch, seq, k] int64.
    """
    batch = len(experts)
    rows = torch.arange(batch, device=experts.device).view(-1, 1, 1)
    order, counts = dispatch((rows * num_experts + experts).flatten(1), batch * num_experts)  # each row's experts are experts of its own
    starts = counts.cumsum(0) - counts
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = torch.arange(len(order), device=order.device) - starts.repeat_interleave(counts, output_size=len(order)) < capacity
    return torch.where(kept.view_as(experts), experts, num_experts)


def expert_capacity(factor: float, seq: int, k: int, num_experts: int) -> int:
    """How many choices of a row of `seq` tokens one expert takes: `factor` times its equal share, rounded up. The factor is the decimal
    that was written: in floating point 1.1 * 100 is more than 110."""
    return math.ceil(Fraction(str(factor)) * seq * k / num_experts)
