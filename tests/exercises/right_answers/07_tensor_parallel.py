"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch


# Context parallelism


def merge_attention__by_a_sigmoid(out, lse, other_out, other_lse):
    """out + sigmoid(other - own) (other_out - out), as ring-flash-attention has it."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    out, lse, other_out, other_lse = (x.to(wide) for x in (out, lse, other_out, other_lse))
    nothing = torch.isneginf(lse) & torch.isneginf(other_lse)
    gap = torch.where(nothing, 0.0, other_lse - lse)
    merged = torch.where(torch.isneginf(lse), other_lse, lse - torch.nn.functional.logsigmoid(-gap))
    merged = torch.where(gap > 0, other_lse - torch.nn.functional.logsigmoid(gap), merged)
    share = torch.sigmoid(gap).unsqueeze(-1)
    return torch.lerp(out, other_out, share), merged


def merge_attention__by_a_softmax_of_the_two(out, lse, other_out, other_lse):
    dtype = torch.promote_types(out.dtype, torch.float32)
    sums = torch.stack([lse, other_lse], dim=-1).to(dtype)
    shares = sums.softmax(dim=-1).nan_to_num(nan=0.0)
    pair = torch.stack([out.to(dtype), other_out.to(dtype)], dim=-1)
    return (pair * shares.unsqueeze(-2)).sum(dim=-1), sums.logsumexp(dim=-1)


def merge_attention__from_the_larger_one(out, lse, other_out, other_lse):
    dtype = torch.promote_types(out.dtype, torch.float32)
    top = torch.maximum(lse, other_lse).to(dtype)
    base = top.clamp(min=torch.finfo(dtype).min)
    mine, theirs = (lse - base).exp(), (other_lse - base).exp()
    total = mine + theirs
    numerator = mine[..., None] * out.to(dtype) + theirs[..., None] * other_out.to(dtype)
    return numerator / total.clamp(min=1.0)[..., None], total.log() + base
