"""Solutions of chapter 07. Each body with the reason why it is written this way."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.sharding import Range
from shared.parallel.comm.communicator import Communicator


# Tensor parallelism


def f_and_g(group: Communicator) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Both need the same sum, one of values and the other of gradients: in a tensor of its own, since neither x nor a gradient is ours to
    change, and contiguous, as collectives want it. The classes know the group, so nothing needs to be kept in `ctx`."""

    def summed(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return summed(upstream)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return upstream

    return Enter.apply, Leave.apply


def tensor_shards(shapes: Mapping[str, Sequence[int]], head_dim: int, ranks: int) -> dict[str, tuple[int, list[Range]]]:
    """One formula cuts n units over the ranks, the longer slices first; what differs is the dimension, and what a unit is. Where there are
    fewer heads than ranks, rank r needs head r * heads // ranks, by the same rule by which its queries are found."""

    def shares(units: int, size: int) -> list[Range]:
        if units < ranks:
            return [(rank * units // ranks * size, (rank * units // ranks + 1) * size) for rank in range(ranks)]
        each, more = divmod(units, ranks)
        starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
        return [(start * size, stop * size) for start, stop in pairwise(starts)]

    cuts = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in ("q_proj", "k_proj", "v_proj"):
            cuts[name] = 0, shares(shape[0] // head_dim, head_dim)
        elif layer in ("gate_proj", "up_proj") or module in ("embedding.tokens", "head.linear"):
            cuts[name] = 0, shares(shape[0], 1)
        elif (layer in ("o_proj", "down_proj") and kind == "weight") or layer == "relative_bias":
            cuts[name] = 1, shares(shape[1], 1)
    return cuts


def gradient_sums(names: Sequence[str], sequence_parallel: bool, copied_heads: bool) -> dict[str, str]:
    """Three questions for each name: does it see this rank's heads or tokens only, in every layout; does it see this rank's positions only;
    is it held in copies? All others see what all ranks see, or are held once."""
    sums = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        of_stream = layer in ("attention_norm", "cross_attention_norm", "feed_forward_norm", "final_norm")
        row_bias = layer in ("o_proj", "down_proj") and kind == "bias"
        if layer in ("q_norm", "k_norm") or module in ("head.transform", "head.norm"):
            sums[name] = "all"
        elif sequence_parallel and (of_stream or row_bias):
            sums[name] = "all"
        elif copied_heads and layer in ("k_proj", "v_proj"):
            sums[name] = "copies"
    return sums


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """The bias waits for the sum: added before it, it would be counted once for each rank. It is rounded to the dtype of the product, as
    in a layer that is not cut, so that mixed precision does not widen what follows."""
    whole = combine(F.linear(x, weight))
    return whole if bias is None else whole + bias.to(whole.dtype)


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit is known first, so every exponential is at most 1. The sum of exponentials and the target's logit, which is 0 on
    all ranks but the one that has it, then travel in one message."""
    counted = targets != -100
    local = targets - first
    here = (local >= 0) & (local < logits.shape[-1])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(dim=-1)
    group.all_reduce(largest, op="max")
    sums = (wide - largest.unsqueeze(-1)).exp_().sum(dim=-1)
    chosen = wide.gather(-1, local.where(here, 0).unsqueeze(-1)).squeeze(-1).where(here, 0)
    both = torch.stack([sums, chosen])
    group.all_reduce(both)
    normalizer, chosen = both[0].log() + largest, both[1]
    return (normalizer - chosen).where(counted, 0), normalizer, counted & (chosen == largest)


# Context parallelism


def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """exp(lse - merged) is the share of a part in the whole softmax, at most 1. A query that looks nowhere has -inf for both, and -inf
    minus -inf is NaN, so 0 takes the place of the sum there: exp(-inf - 0) is 0. The weights are float32, which widens narrower outputs."""
    merged = torch.logaddexp(lse, other_lse)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    weight, other_weight = (part.sub(finite).exp().unsqueeze(-1) for part in (lse, other_lse))
    return weight * out + other_weight * other_out, merged
