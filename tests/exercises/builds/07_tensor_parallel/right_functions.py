"""A right build in another style: functions over a dictionary, Megatron-LM's way. A column-parallel layer is one autograd function, which
under sequence parallelism keeps its own positions only and gathers them once more in the backward pass; the cross-entropy has its gradient
written out; the vocabulary is cut into equal runs but the last; copies of key-value heads add up in a whole gradient of zeros."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from shared.model.norm import rms_norm
from shared.model.rope import apply_rope, rope_tables


def whole_sequence(m, x):
    flat = x.new_empty(m.group.size, *x.shape)
    m.group.all_gather(flat, x.contiguous())
    return torch.cat([*flat], dim=1)


def own_sum(m, x):
    chunks = torch.stack(x.chunk(m.group.size, dim=1)).contiguous()
    out = torch.empty_like(chunks[0])
    m.group.reduce_scatter(out, chunks)
    return out


class Column(torch.autograd.Function):
    """x @ weight.T + bias, where the ranks have other outputs."""

    @staticmethod
    def forward(ctx, x, weight, bias, m):
        ctx.m = m
        ctx.save_for_backward(x, weight)
        return F.linear(whole_sequence(m, x) if m.cut else x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x, weight), m = ctx.saved_tensors, ctx.m
        dx = dy @ weight
        if m.cut:
            dx, x = own_sum(m, dx), whole_sequence(m, x)
        else:
            m.group.all_reduce(dx)
        flat = dy.flatten(0, 1)
        return dx, flat.T @ x.flatten(0, 1), flat.sum(0), None


class Row(torch.autograd.Function):
    """The sum over the ranks of x @ weight.T, plus bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, m):
        ctx.m = m
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        if m.cut:
            return own_sum(m, y) + bias
        m.group.all_reduce(y)
        return y + bias

    @staticmethod
    def backward(ctx, dy):
        (x, weight), m = ctx.saved_tensors, ctx.m
        bias = dy.flatten(0, 1).sum(0)
        if m.cut:
            dy = whole_sequence(m, dy)
        return dy @ weight, dy.flatten(0, 1).T @ x.flatten(0, 1), bias, None


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, m):
        ctx.m = m
        here = (ids >= m.first) & (ids < m.first + len(weight))
        local = torch.where(here, ids - m.first, 0)
        ctx.save_for_backward(here, local, weight)
        rows = torch.where(here.unsqueeze(-1), weight[local], 0)
        if m.cut:
            return own_sum(m, rows)
        m.group.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx, dy):
        (here, local, weight), m = ctx.saved_tensors, ctx.m
        dy = whole_sequence(m, dy) if m.cut else dy
        return None, torch.zeros_like(weight).index_add(0, local[here], dy[here]), None


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, m):
        top = logits.max(-1, keepdim=True)[0]
        m.group.all_reduce(top, op="max")
        exponentials = torch.exp(logits - top)
        total = exponentials.sum(-1, keepdim=True)
        m.group.all_reduce(total)
        here = (targets >= m.first) & (targets < m.first + logits.shape[-1])
        one_hot = F.one_hot(torch.where(here, targets - m.first, 0), logits.shape[-1]) * here.unsqueeze(-1)
        hit = (logits * one_hot).sum(-1, keepdim=True)
        m.group.all_reduce(hit)
        counted = (targets != -100).unsqueeze(-1)
        ctx.save_for_backward((exponentials / total - one_hot) * counted)
        return torch.where(counted, torch.log(total) + top - hit, 0).sum()

    @staticmethod
    def backward(ctx, dy):
        return ctx.saved_tensors[0] * dy, None, None


def make_model(config, weights, group, sequence_parallel=False):
    c, size, rank = config, group.size, group.rank
    H, K, inner, d = c.num_attention_heads, c.num_key_value_heads, c.intermediate_size, c.head_dim
    if H % size or inner % size or (K % size and size % K):
        raise ValueError(f"cannot cut {H} heads, {K} key-value heads and {inner} features over {size} ranks")
    per = -(-c.vocab_size // size)
    width, vocabulary = torch.arange(c.hidden_size), torch.arange(rank * per, min((rank + 1) * per, c.vocab_size))
    block = lambda n: torch.arange(n // size * rank, n // size * (rank + 1))  # noqa: E731
    kv = block(K * d) if K >= size else torch.arange(d) + d * (rank * K // size)
    gate_up = torch.stack([block(inner), inner + block(inner)]).flatten()
    inside = {"q_proj": block(H * d), "k_proj": kv, "v_proj": kv, "gate_up_proj": gate_up}
    place = {}
    for name in weights:
        short = name.split(".")[-2]
        if short in ("embedding", "head"):
            place[name] = (vocabulary, width)
        elif short in inside:
            place[name] = (inside[short], width) if name.endswith("weight") else (inside[short],)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            place[name] = (width, block(H * d) if "o_proj" in name else block(inner))
        else:
            place[name] = (width,)
    w = {name: weights[name][torch.meshgrid(*at, indexing="ij")].clone().requires_grad_() for name, at in place.items()}
    return SimpleNamespace(c=c, group=group, cut=sequence_parallel, w=w, place=place, first=rank * per)


def layer_of(m, number, part):
    return [m.w[f"blocks.{number}.{part}.{kind}"] for kind in ("weight", "bias")]


def feed_forward(model, layer, x):
    gate, up = Column.apply(x, *layer_of(model, layer, "feed_forward.gate_up_proj"), model).chunk(2, -1)
    return Row.apply(F.silu(gate) * up, *layer_of(model, layer, "feed_forward.down_proj"), model)


def attention(model, layer, x):
    three = [layer_of(model, layer, f"attention.{each}_proj") for each in "qkv"]
    sizes = [len(bias) for _, bias in three]
    weight, bias = (torch.cat(each) for each in zip(*three, strict=True))
    q, k, v = Column.apply(x, weight, bias, model).split(sizes, -1)
    q, k, v = (each.unflatten(-1, (-1, model.c.head_dim)).transpose(1, 2) for each in (q, k, v))
    tables = rope_tables(model.c, torch.arange(q.shape[2]), q.shape[2])
    q, k = apply_rope(q, *tables), apply_rope(k, *tables)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * model.c.head_dim**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return Row.apply((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), *layer_of(model, layer, "attention.o_proj"), model)


def embed(model, ids):
    bad = [i for i in ids.flatten().tolist() if not 0 <= i < model.c.vocab_size]
    if bad:
        raise ValueError(f"token {bad[0]} is not one of {model.c.vocab_size}")
    return Lookup.apply(ids, model.w["embedding.weight"], model)


def head(model, x):
    weight = model.w["head.weight"]
    return Column.apply(x, weight, weight.new_zeros(len(weight)), model)


def require_targets(model, targets):
    bad = [i for i in targets.flatten().tolist() if i != -100 and not 0 <= i < model.c.vocab_size]
    if bad:
        raise ValueError(f"target {bad[0]} is not one of {model.c.vocab_size}")


def head_loss(model, x, targets):
    require_targets(model, targets)
    return Loss.apply(head(model, x), targets, model)


def body(model, ids):
    if model.cut and ids.shape[1] % model.group.size:
        raise ValueError(f"{ids.shape[1]} positions cannot be cut over {model.group.size} ranks")
    x, norm = embed(model, ids), lambda x, name: rms_norm(x, model.w[f"{name}.weight"], model.c.norm_eps)
    for number in range(model.c.num_hidden_layers):
        x = x + attention(model, number, norm(x, f"blocks.{number}.attention_norm"))
        x = x + feed_forward(model, number, norm(x, f"blocks.{number}.feed_forward_norm"))
    return norm(x, "final_norm")


def state(model):
    return model.w


def layout(model):
    return model.place


def loss_and_gradients(model, ids, targets):
    require_targets(model, targets)
    loss = head_loss(model, body(model, ids), targets)
    gradients = dict(zip(model.w, torch.autograd.grad(loss, model.w.values()), strict=True))
    for name, gradient in gradients.items():
        if (".k_proj" in name or ".v_proj" in name) and model.c.num_key_value_heads < model.group.size:
            whole = gradient.new_zeros(model.c.num_key_value_heads * model.c.head_dim, *gradient.shape[1:])
            rows = model.place[name][0]
            whole[rows] = gradient
            model.group.all_reduce(whole)
            gradients[name] = whole[rows]
        elif model.cut and ("norm" in name or "o_proj.bias" in name or "down_proj.bias" in name):
            model.group.all_reduce(gradient)
    return loss.detach(), gradients


def logits(model, ids):
    return head(model, body(model, ids))
