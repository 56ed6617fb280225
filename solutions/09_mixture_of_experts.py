"""Solutions of chapter 09. Each body with the reason why it is written this way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.moe.parallel.groups import RankGroups
from shared.parallel.comm.communicator import Communicator


# The router


def top_k_routing(
    scores: Tensor, k: int, normalize: bool, scaling: float = 1.0, bias: Tensor | None = None, groups: int = 1, best_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """What is compared is detached: neither the choice nor the bias has a gradient. An expert of a closed group gets minus infinity,
    because 0 would be more than a negative biased score."""
    choice = (scores if bias is None else scores + bias).detach()
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2).values.sum(dim=-1).topk(best_groups).indices
        open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(k).indices
    weights = scores.gather(-1, experts)
    if normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / total.where(total > 0, 1)
    return weights * scaling, experts


def balance_loss(
    probabilities: Tensor, experts: Tensor, valid: Tensor, over_row: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """n f is a row's count of choices, and n P its sum of probabilities, so each row divides their product by n once. What does not count
    is selected away: NaN times 0 would be NaN. The rows' lengths follow from the counts, so ranks add up nothing else."""
    mass = torch.where(valid.unsqueeze(-1), probabilities, 0).sum(dim=1)  # [batch, E]
    counted = valid.repeat_interleave(experts.shape[-1], dim=1).to(mass.dtype)  # [batch, seq * k]
    counts = torch.zeros_like(mass).scatter_add_(1, experts.flatten(1), counted)
    counts = counts if over_row is None else over_row(counts)
    tokens = (counts.sum(dim=-1) / experts.shape[-1]).clamp(min=1)
    return ((counts * mass).sum(dim=-1) / tokens).sum()


def z_loss(logits: Tensor, valid: Tensor) -> Tensor:
    """Selected twice: before logsumexp, whose gradient at NaN is NaN even where nothing flows back, and after it, as it is not 0 at 0."""
    logits = torch.where(valid.unsqueeze(-1), logits, 0)
    return torch.where(valid, logits.logsumexp(dim=-1).square(), 0).sum()


# Dispatch and combine


def dispatch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A sort that is not called stable may put equal ones in any order, and on a GPU it does. The dropped choices count as one
    expert more, whose count is cut off."""
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)[:num_experts]


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """`order` says which choice a row is; its inverse, which row a choice is. Adding rows to their tokens with `index_add` would do as
    well, but on a GPU it adds in another order each time. `index_select` has a faster backward pass than indexing with brackets."""
    by_token = rows.index_select(0, order.argsort()).unflatten(0, weights.shape)
    return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


# Expert parallelism


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Each row is somewhere else afterwards and stays what it is, so its gradient comes back by the way on which the row went: the same
    exchange, with the two lists of numbers in each other's place."""

    def exchanged(given: Tensor, numbers: Sequence[int], arriving: Sequence[int]) -> Tensor:
        arrived = given.new_empty(sum(arriving), *given.shape[1:])
        group.all_to_all(arrived.split(arriving), given.contiguous().split(numbers))
        return arrived

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            return exchanged(rows, sent, received)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return exchanged(upstream, received, sent)

    return Exchange.apply(rows)


def gradient_ranks(pipeline: int, data: int, context: int, tensor: int, expert: int, num_experts: int) -> list[RankGroups]:
    """An expert's gradient lacks the rows of the other exchange groups, so it is added over all ranks that hold the expert, in any data
    or context coordinate: no more, or rows would be counted twice. All other gradients lack the tokens of all other ranks."""
    table, each = [], num_experts // expert
    for rank in range(pipeline * data * context * tensor):
        outer, tp = divmod(rank, tensor)
        outer, cp = divmod(outer, context)
        pp, own = divmod(outer, data)
        number = lambda d, c, pp=pp, tp=tp: ((pp * data + d) * context + c) * tensor + tp  # noqa: E731
        first, place = own - own % expert, own % expert
        table.append(
            RankGroups(
                (place * each, (place + 1) * each),
                [number(d, cp) for d in range(first, first + expert)],
                [number(d, c) for d in range(place, data, expert) for c in range(context)],
                [number(d, c) for d in range(data) for c in range(context)],
            )
        )
    return table
