"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch
import torch.nn.functional as F


def vocabulary_cross_entropy__from_local_logsumexps(logits, targets, first, group):
    """Each rank's own logsumexp, and exponentials of these alone; the masks by one-hot columns."""
    logits = logits.float() if logits.itemsize < 4 else logits
    kept = targets.ne(-100)
    highest = logits.max(dim=-1).values if logits.numel() else logits.sum(-1)
    group.all_reduce(highest, op="max")
    own = torch.logsumexp(logits, dim=-1)
    column = targets - first
    inside = torch.logical_and(column >= 0, column < logits.size(1))
    target_logit = torch.zeros_like(own)
    rows = inside.nonzero().flatten()
    target_logit[rows] = logits[rows, column[rows]]
    sums = torch.stack((torch.exp(own - highest), target_logit), dim=0)
    group.all_reduce(sums)
    lse = highest + torch.log(sums[0])
    losses = torch.where(kept, lse - sums[1], torch.zeros_like(lse))
    return losses, lse, kept & sums[1].eq(highest)


def vocabulary_cross_entropy__by_flattened_message(logits, targets, first, group):
    """Everything shifted by the largest, the target's logit too; the message is one flat tensor of two numbers a row."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    top = torch.amax(logits, -1).to(dtype)
    group.all_reduce(top, "max")
    shifted = logits.to(dtype) - top[:, None]
    width, rows = logits.shape[1], len(targets)
    elsewhere = (targets < first) | (targets >= first + width)
    index = (targets - first).masked_fill(elsewhere, 0)
    message = shifted.new_zeros(2 * rows)
    message[rows:] = shifted.gather(1, index[:, None])[:, 0].masked_fill(elsewhere, 0.0)
    message[:rows] = shifted.exp_().sum(1)
    group.all_reduce(message)
    logs = message[:rows].log()
    ignored = targets == -100
    losses = (logs - message[rows:]).masked_fill(ignored, 0.0)
    return losses, logs + top, (message[rows:] == 0) & ~ignored


def row_linear__by_matmul(x, weight, bias, combine):
    part = torch.matmul(x, weight.t())
    total = combine(part)
    if bias is not None:
        total = torch.add(total, bias.to(dtype=total.dtype))
    return total


def row_linear__into_the_sum(x, weight, bias, combine):
    """The sum is a new tensor, and may be added to."""
    result = combine(F.linear(x, weight, bias=None))
    if bias is None:
        return result
    result += bias
    return result


def f_and_g__by_two_functions_around_one_class(group):
    """One class, with an argument that says in which of its passes it sums; the flag is kept in ctx."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, in_forward):
            ctx.in_forward = in_forward
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
            if in_forward:
                group.all_reduce(out)
            return out

        @staticmethod
        def backward(ctx, upstream):
            if ctx.in_forward:
                return upstream.clone(), None
            out = torch.zeros(upstream.shape, dtype=upstream.dtype, device=upstream.device).add_(upstream)
            group.all_reduce(out)
            return out, None

    return (lambda x: Sum.apply(x, False)), (lambda x: Sum.apply(x, True))


def f_and_g__with_hooks(group):
    """f as a hook on a view of x."""

    def f(x):
        y = x.view_as(x)

        def add_up(gradient):
            total = gradient.contiguous().clone()
            group.all_reduce(total)
            return total

        if y.requires_grad:
            y.register_hook(add_up)
        return y

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.detach().clone().contiguous()
            group.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return f, Total.apply


def tensor_shards__by_patterns(shapes, head_dim, ranks):
    """A table of patterns, as sharding rules are written in JAX; slices from torch's tensor_split of the units."""
    import re

    rules = [
        (r"[qkv]_proj\.(weight|bias)$", 0, head_dim),
        (r"(gate|up)_proj\.(weight|bias)$", 0, 1),
        (r"(o|down)_proj\.weight$", 1, 1),
        (r"^(embedding\.tokens|head\.linear)\.", 0, 1),
        (r"relative_bias\.weight$", 1, 1),
    ]
    result = {}
    for name in shapes:
        for pattern, dimension, unit in rules:
            if re.search(pattern, name):
                units = torch.arange(shapes[name][dimension] // unit)
                owned = units.repeat_interleave(max(1, ranks // len(units))).tensor_split(ranks)
                result[name] = (dimension, [(int(part[0]) * unit, int(part[-1] + 1) * unit) for part in owned])
    return result


def tensor_shards__rank_by_rank(shapes, head_dim, ranks):
    def even(size):
        edges = [0]
        for rank in range(ranks):
            edges.append(edges[-1] + (size - edges[-1] + ranks - rank - 1) // (ranks - rank))
        return list(zip(edges, edges[1:]))

    plan = {}
    for name, shape in shapes.items():
        owner, kind = name.split(".")[-2:]
        if owner in {"k_proj", "v_proj"} and shape[0] < ranks * head_dim:
            copies = ranks * head_dim // shape[0]
            heads = [rank // copies for rank in range(ranks)]
            plan[name] = (0, [(head_dim * head, head_dim * (head + 1)) for head in heads])
        elif owner in {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} or name.startswith(("embedding.tokens.", "head.linear.")):
            plan[name] = (0, even(shape[0]))
        elif owner == "relative_bias" or (owner in {"o_proj", "down_proj"} and kind == "weight"):
            plan[name] = (1, even(shape[1]))
    return plan


def gradient_sums__by_patterns(names, sequence_parallel, copied_heads):
    import re

    everywhere = r"\.[qk]_norm\.|^head\.(transform|norm)\."
    if sequence_parallel:
        everywhere += r"|\.(attention|cross_attention|feed_forward|final)_norm\.|\.(o|down)_proj\.bias$"
    found = {}
    for name in names:
        if re.search(everywhere, name):
            found[name] = "all"
        elif copied_heads and re.search(r"\.[kv]_proj\.", name):
            found[name] = "copies"
    return found


def gradient_sums__by_sets(names, sequence_parallel, copied_heads):
    """Paths as tuples; what is whole is taken out first."""
    table = {}
    for parts in map(lambda name: tuple(name.split(".")), names):
        name, owner, attribute = ".".join(parts), parts[-2], parts[-1]
        if parts[0] == "embedding" or owner in {"relative_bias", "linear", "up_proj", "gate_proj", "q_proj"}:
            continue
        if owner in {"k_proj", "v_proj"}:
            if copied_heads:
                table[name] = "copies"
            continue
        if parts[0] == "head" or owner in {"q_norm", "k_norm"}:
            table[name] = "all"
        elif sequence_parallel and not (owner.endswith("_proj") and attribute == "weight"):
            table[name] = "all"
    return table


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
