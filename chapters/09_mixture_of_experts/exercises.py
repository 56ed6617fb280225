"""Your part of chapter 09. Write each body in place of its `raise` line, in any order.

    course check 09          checks what you wrote
    course hint 09.top_k_routing    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.moe.parallel.groups import RankGroups
from shared.parallel.comm.communicator import Communicator


# Top-k routing (20 min, difficulty 2 of 5)
def top_k_routing(
    scores: Tensor, k: int, normalize: bool, scaling: float = 1.0, bias: Tensor | None = None, groups: int = 1, best_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Top-k routing: choose the k best experts for each token, and say how much each of them counts.

    An expert is chosen by its score plus its bias, and counts by its score alone:

        - The k experts with the largest biased scores are chosen, each at most once. Of equal ones, either may be.
        - A chosen expert's weight is its score without the bias. The bias has no gradient, and changes no digit of a weight.
        - With `normalize`, a token's weights are divided by their sum, however small, and then add up to 1. Sigmoids can all be rounded to
          0: weights that are all 0 stay 0.
        - `scaling` multiplies the weights after that.
        - With groups, each group has E / groups consecutive experts. A token chooses only among the experts of the
          `best_groups` best groups. A group is as good as the sum of its two largest biased scores, which may be negative
          (DeepSeek-V3, section 2.1.2).

    No loop runs over tokens.

    Args:
        scores: [..., E], at least 0.
        k: at least 1, at most the number of experts that a token may choose from.
        normalize: whether a token's weights add up to 1.
        scaling: multiplies the weights.
        bias: [E], or None for 0.
        groups: a divisor of E; with several, each has two experts or more.
        best_groups: at most `groups`.

    Returns:
        weights: [..., k] in the dtype of `scores`, with a gradient to the scores. The expert with the largest biased score comes first.
        experts: [..., k] int64.

    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=True)
    (tensor([0.6250, 0.3750]), tensor([1, 2]))
    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=False, bias=torch.tensor([0.4, 0.0, 0.0]))
    (tensor([0.2000, 0.5000]), tensor([0, 1]))
    """
    raise NotImplementedError("09.top_k_routing: write this body")


# The load-balancing loss (30 min, difficulty 3 of 5)
def balance_loss(
    probabilities: Tensor, experts: Tensor, valid: Tensor, over_row: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The load-balancing loss of a layer, row by row, each row times its valid tokens.

        sum over rows r of  n_r * sum over experts i of f_ri * P_ri

        f_ri = choices of expert i by the row's n_r valid tokens / n_r         P_ri = mean over those tokens of probabilities[..., i]

    Tokens that do not count add nothing, and their gradient is 0, whatever their probabilities are, even NaN; NaN at a token that counts
    makes the loss NaN. A row may have no valid token, and adds 0.

    Count choices in the dtype of `probabilities`, not in int64: two int64 tensors divide to float32, which is too coarse for float64.

    No loop runs over rows, tokens or experts. There are hundreds of experts: apart from the arguments, no more is held at a time than
    about three tensors of the size of `probabilities` ([batch, seq, k, E] would be k of them).

    Args:
        probabilities: [batch, seq, E] in float32 or float64, each token's adding up to 1. The loss has a gradient to them alone.
        experts: [batch, seq, k] int64, the experts that each token chose, k different ones.
        valid: [batch, seq] bool, the tokens that count.
        over_row: for context parallelism, where a rank has some tokens of every row: called once, with the counts of choices [batch, E]
            of the tokens given here, in the dtype of `probabilities`, it returns a new tensor, the counts of the whole rows. What is
            returned is then these tokens' part of the loss; the ranks' parts add up to the loss of the whole rows. None where the rows are
            whole.

    Returns:
        [], in the dtype of `probabilities`. Where all is balanced, k / E for each valid token.

    >>> probabilities, experts = torch.full((1, 2, 4), 0.25), torch.tensor([[[0, 1], [2, 3]]])
    >>> balance_loss(probabilities, experts, torch.ones(1, 2, dtype=torch.bool))               # 2 tokens * 2 / 4
    tensor(1.)
    """
    raise NotImplementedError("09.balance_loss: write this body")


# The router z-loss (10 min, difficulty 1 of 5)
def z_loss(logits: Tensor, valid: Tensor) -> Tensor:
    """The router z-loss (Zoph et al. 2022, ST-MoE, equation 5): it keeps the logits small, so they are rounded less.

        sum over valid tokens of log(sum over experts of exp(logit)) ** 2

    Logits of hundreds must not overflow. Tokens that do not count add nothing, and their gradient is 0, whatever their logits are, even
    NaN; NaN at a token that counts makes the loss NaN. No loop runs over rows, tokens or experts.

    Args:
        logits: [batch, seq, E] in float32 or float64.
        valid: [batch, seq] bool, the tokens that count.

    Returns:
        [], in the dtype of `logits`.

    >>> z_loss(torch.zeros(1, 3, 8), torch.tensor([[True, True, False]]))                       # 2 tokens * log(8) ** 2
    tensor(8.6482)
    """
    raise NotImplementedError("09.z_loss: write this body")


# Dispatch: tokens sorted by expert (10 min, difficulty 2 of 5)
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
    raise NotImplementedError("09.dispatch: write this body")


# Combine: back to the tokens (20 min, difficulty 2 of 5)
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
    raise NotImplementedError("09.combine: write this body")


# The all-to-all, with its backward pass (35 min, difficulty 3 of 5)
def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Send each rank its rows, and receive this rank's from every rank: an all-to-all with uneven splits, and its backward pass.

    A row has the same numbers afterwards, on another rank. Autograd does not see what a group's collectives do, so the function states its
    own derivative. The loss is the sum of all ranks' losses. The gradient of a row is computed on the rank that received the row, and the
    rank that sent it needs it.

        - The forward pass calls `group.all_to_all(there, here)` once, and the backward pass once more. It fills the tensor there[r] with
          what rank r gives as here[this rank]. Both are one contiguous tensor for each rank, all of one dtype; a tensor may be empty. Each
          pass sends every row once and nothing else, and copies no rows that lie together already.
        - Every rank of the group takes part in both passes, also one that sends nothing or receives nothing: the others wait for it.
        - Neither `rows` nor the incoming gradient is changed. Both may be non-contiguous. Between the passes no rows are
          kept: a backward pass needs none.

    Args:
        rows: [sum(sent), D] of any dtype, sorted by the rank that they go to.
        sent: how many of them go to each rank of the group, this one included; may be 0.
        received: how many come from each rank.
        group: the ranks that exchange rows.

    Returns:
        [sum(received), D] in the dtype of `rows`: the rows from rank 0 first, each rank's in the order in which it sent them.

    >>> exchange_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2], [2], SingleRankCommunicator())
    tensor([[1., 2.],
            [3., 4.]])
    """
    raise NotImplementedError("09.exchange_rows: write this body")


# Who adds whose gradients (20 min, difficulty 3 of 5)
def gradient_ranks(pipeline: int, data: int, context: int, tensor: int, expert: int, num_experts: int) -> list[RankGroups]:
    """Decide which experts each rank holds, between which ranks rows travel, and over which ranks which gradients are added.

    Ranks are numbered along all axes, the last one fastest:

        rank = ((pp * data + d) * context + cp) * tensor + tp

    What they hold, and what they see:

        - Each pipeline stage pp has layers of its own, and each tensor coordinate tp a slice of its own of every matrix. Ranks that share
          both hold the same, apart from experts, and see different tokens: along `data` other rows, along `context` other positions.
        - Experts are spread over `expert` consecutive data ranks of one context coordinate, E / expert on each, in the order of the
          ranks. The next `expert` data ranks hold all experts again, and the ranks of every context coordinate do the same.
        - A row travels to the rank that holds its expert, among these `expert` ranks, and its gradient comes back. So a rank has computed
          an expert's gradient for rows from all of them, and every other gradient for its own tokens.

    In the end each gradient is the sum over all tokens that the data and context ranks see, each counted once.

    Args:
        pipeline, context, tensor: the degrees of these axes.
        data: data-parallel ranks, fully sharded ones included (`ParallelConfig.data_ranks`).
        expert: over how many data ranks experts are spread; divides `data`.
        num_experts: E; divisible by `expert`.

    Returns:
        The line of each rank, in the order of the ranks.

    >>> gradient_ranks(pipeline=1, data=4, context=1, tensor=1, expert=2, num_experts=4)[3]
    RankGroups(experts=(2, 4), exchange=[2, 3], same_experts=[1, 3], everything_else=[0, 1, 2, 3])
    """
    raise NotImplementedError("09.gradient_ranks: write this body")
