"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch
import torch.nn.functional as F


def rms_norm__as_the_formula_reads(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def rms_norm__einsum_for_the_squares(x, weight, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    mean_square = torch.einsum("...d,...d->...", wide, wide)[..., None] / x.size(-1)
    return weight * (wide * (mean_square + eps) ** -0.5).type_as(x)


def apply_rope__rotate_half(x, cos, sin):
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    twice = lambda table: torch.cat([table, table], dim=-1)  # noqa: E731
    return (x * twice(cos) + rotated * twice(sin)).type_as(x)


def apply_rope__matrices(x, cos, sin):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.stack(wide.chunk(2, dim=-1), dim=-1)
    matrices = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2).to(wide.dtype)
    turned = (matrices @ pairs.unsqueeze(-1)).squeeze(-1)
    return turned.transpose(-1, -2).flatten(-2).to(x.dtype)


def grouped_query_attention__repeated_keys(queries, keys, values, mask=None, bias=None, scale=None):
    repeats = queries.size(1) // keys.size(1)
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * (queries.size(-1) ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    if mask is None:
        return scores.softmax(-1).to(values.dtype) @ values
    scores = torch.where(mask, scores, -1e30)
    weights = torch.where(mask, scores.softmax(-1), 0.0)
    return weights.to(values.dtype) @ values


def grouped_query_attention__head_by_head(queries, keys, values, mask=None, bias=None, scale=None):
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    scale = scale if scale is not None else 1 / queries.shape[-1] ** 0.5
    out = []
    for head in range(heads):
        scores = scale * queries[:, head] @ keys[:, head // group].mT
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if bias is not None:
            scores = scores + bias[:, min(head, bias.shape[1] - 1)]
        if mask is not None:
            hidden = ~mask[:, 0].expand(scores.shape)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights * (~hidden)
        out.append(weights.to(values.dtype) @ values[:, head // group])
    return torch.stack(out, dim=1)


def swiglu__step_by_step(x, gate, up, down, activation=F.silu):
    passing = up(x)
    opened = activation(gate(x))
    return down(passing.mul(opened))


def swiglu__einsum(x, gate, up, down, activation=F.silu):
    return down(torch.einsum("...i,...i->...i", activation(gate(x)), up(x)))


def block_forward__two_branches(x, sublayers, pre_norm):
    for norm, sublayer in sublayers:
        if pre_norm:
            x = sublayer(norm(x)) + x
        else:
            x = norm(sublayer(x) + x)
    return x


def block_forward__recursion_by_index(x, sublayers, pre_norm):
    stream, place = x, 0
    while place < len(sublayers):
        norm, sublayer = sublayers[place]
        stream = torch.add(stream, sublayer(norm(stream))) if pre_norm else norm(torch.add(stream, sublayer(stream)))
        place += 1
    return stream
