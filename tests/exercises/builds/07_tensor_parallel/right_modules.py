"""A right build in another style: modules whose parameters carry their own place, gate and up as two parameters, gradients by `backward`
and one all-reduce for each parameter that needs it. The vocabulary is cut in strides."""

import torch
import torch.nn.functional as F
from torch import nn

from shared.model.rope import apply_rope, rope_tables


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone().contiguous()
        ctx.group.all_reduce(gradient)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone().contiguous()
        group.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def to_front(x):
    return x.transpose(0, 1).contiguous()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        first = to_front(x)
        whole = first.new_empty(len(first) * group.size, *first.shape[1:])
        group.all_gather(whole, first)
        return to_front(whole)

    @staticmethod
    def backward(ctx, gradient):
        return Scatter.apply(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        first = to_front(x)
        part = first.new_empty(len(first) // group.size, *first.shape[1:])
        group.reduce_scatter(part, first)
        return to_front(part)

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient, ctx.group), None


class Piece(nn.Parameter):
    """A part of a weight: indices for each dimension, and the group over which its gradient is summed, if any."""

    def __new__(cls, whole, *indices, over=None):
        data = whole[indices[0]] if len(indices) == 1 else whole[indices[0]][:, indices[1]]
        piece = super().__new__(cls, data.clone())
        piece.indices, piece.over = indices, over
        return piece


class Layer(nn.Module):
    def __init__(self, model, weights, name):
        super().__init__()
        c, rank, size = model.config, model.group.rank, model.group.size
        every = torch.arange(c.hidden_size)
        d, inner = c.head_dim, c.intermediate_size
        per = c.num_attention_heads // size
        queries = torch.arange(rank * per * d, (rank + 1) * per * d)
        kv = max(c.num_key_value_heads // size, 1)
        first = rank * kv if c.num_key_value_heads >= size else rank // (size // c.num_key_value_heads)
        keys = torch.arange(first * d, (first + kv) * d)
        features = torch.arange(rank, inner, size)  # every size-th feature
        local = model.group if model.by_sequence else None
        get = lambda part: weights[f"{name}.{part}"]  # noqa: E731
        self.norms = nn.ParameterList(Piece(get(f"{part}_norm.weight"), every, over=local) for part in ("attention", "feed_forward"))
        self.q = nn.ParameterList([Piece(get("attention.q_proj.weight"), queries, every), Piece(get("attention.q_proj.bias"), queries)])
        for short in "kv":
            weight, bias = (get(f"attention.{short}_proj.{kind}") for kind in ("weight", "bias"))
            pair = [Piece(weight, keys, every, over=model.copies), Piece(bias, keys, over=model.copies)]
            setattr(self, short, nn.ParameterList(pair))
        out = Piece(get("attention.o_proj.weight"), every, queries)
        self.o = nn.ParameterList([out, Piece(get("attention.o_proj.bias"), every, over=local)])
        weight, bias = get("feed_forward.gate_up_proj.weight"), get("feed_forward.gate_up_proj.bias")
        self.gate = nn.ParameterList([Piece(weight, features, every), Piece(bias, features)])
        self.up = nn.ParameterList([Piece(weight, inner + features, every), Piece(bias, inner + features)])
        down = Piece(get("feed_forward.down_proj.weight"), every, features)
        self.down = nn.ParameterList([down, Piece(get("feed_forward.down_proj.bias"), every, over=local)])

    def named_pieces(self, name):
        """Name in the whole -> its pieces, end to end along dimension 0."""
        yield from ((f"{name}.{part}_norm.weight", [norm]) for part, norm in zip(("attention", "feed_forward"), self.norms, strict=True))
        for kind, at in (("weight", 0), ("bias", 1)):
            for short in "qkvo":
                yield f"{name}.attention.{short}_proj.{kind}", [getattr(self, short)[at]]
            yield f"{name}.feed_forward.gate_up_proj.{kind}", [self.gate[at], self.up[at]]
            yield f"{name}.feed_forward.down_proj.{kind}", [self.down[at]]


class Llama(nn.Module):
    def __init__(self, config, weights, group, by_sequence):
        super().__init__()
        self.config, self.group, self.by_sequence, size = config, group, by_sequence, group.size
        for name in ("num_attention_heads", "intermediate_size"):
            if getattr(config, name) % size:
                raise ValueError(f"{name} is {getattr(config, name)} and there are {size} ranks")
        kv = config.num_key_value_heads
        if max(kv, size) % min(kv, size):
            raise ValueError(f"num_key_value_heads is {kv} and there are {size} ranks")
        self.copies = None
        if kv < size:
            groups = [[rank for rank in range(size) if rank * kv // size == head] for head in range(kv)]
            self.copies = group.split("same_head", groups)
        every, self.tokens = torch.arange(config.hidden_size), torch.arange(group.rank, config.vocab_size, size)
        self.embedding = Piece(weights["embedding.weight"], self.tokens, every)
        self.head = Piece(weights["head.weight"], self.tokens, every)
        self.final = Piece(weights["final_norm.weight"], every, over=group if by_sequence else None)
        self.layers = nn.ModuleList(Layer(self, weights, f"blocks.{number}") for number in range(config.num_hidden_layers))
        self.enter, self.leave = (Gather, Scatter) if by_sequence else (Copy, Reduce)

    def named_pieces(self):
        yield from (("embedding.weight", [self.embedding]), ("head.weight", [self.head]), ("final_norm.weight", [self.final]))
        for number, layer in enumerate(self.layers):
            yield from layer.named_pieces(f"blocks.{number}")

    def norm(self, x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * weight

    def look_up(self, ids):
        self.require(ids, "input_ids")
        mine = ids % self.group.size == self.group.rank
        rows = F.embedding(ids.div(self.group.size, rounding_mode="floor") * mine, self.embedding)
        return self.leave.apply(rows * mine.unsqueeze(-1), self.group)

    def attend(self, layer, x):
        x = self.enter.apply(x, self.group)
        cos, sin = rope_tables(self.config, torch.arange(x.shape[1]), x.shape[1])
        split = lambda pair: F.linear(x, *pair).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # noqa: E731
        q, k, v = split(layer.q), split(layer.k), split(layer.v)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.leave.apply(F.linear(y, layer.o[0]), self.group) + layer.o[1]

    def feed(self, layer, x):
        x = self.enter.apply(x, self.group)
        y = F.silu(F.linear(x, *layer.gate)) * F.linear(x, *layer.up)
        return self.leave.apply(F.linear(y, layer.down[0]), self.group) + layer.down[1]

    def stream(self, ids):
        if self.by_sequence and ids.shape[1] % self.group.size:
            raise ValueError(f"{ids.shape[1]} positions on {self.group.size} ranks")
        x = self.look_up(ids)
        for layer in self.layers:
            x = x + self.attend(layer, self.norm(x, layer.norms[0]))
            x = x + self.feed(layer, self.norm(x, layer.norms[1]))
        return self.norm(x, self.final)

    def scores(self, x):
        return F.linear(self.enter.apply(x, self.group), self.head)

    def loss(self, x, targets):
        counted = targets != -100
        scores = self.scores(x)[counted]
        targets = targets[counted]
        top = scores.detach().max(-1).values
        self.group.all_reduce(top, op="max")
        mine = targets % self.group.size == self.group.rank
        hit = scores.gather(1, (targets // self.group.size * mine).unsqueeze(1)).squeeze(1) * mine
        total = Reduce.apply((scores - top.unsqueeze(1)).exp().sum(-1), self.group)
        return (total.log() + top - Reduce.apply(hit, self.group)).sum()

    def require(self, ids, what):
        if ids.numel() and not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise IndexError(f"{what} from {ids.min()} to {ids.max()}, vocabulary of {self.config.vocab_size}")


def make_model(config, weights, group, sequence_parallel=False):
    return Llama(config, weights, group, sequence_parallel)


def state(model):
    return {name: torch.cat([piece.detach() for piece in pieces]) for name, pieces in model.named_pieces()}


def layout(model):
    found = {}
    for name, pieces in model.named_pieces():
        found[name] = (torch.cat([piece.indices[0] for piece in pieces]), *pieces[0].indices[1:])
    return found


def feed_forward(model, layer, x):
    return model.feed(model.layers[layer], x)


def attention(model, layer, x):
    return model.attend(model.layers[layer], x)


def embed(model, ids):
    return model.look_up(ids)


def head_loss(model, x, targets):
    return model.loss(x, targets)


def loss_and_gradients(model, ids, targets):
    model.zero_grad()
    model.require(targets[targets != -100], "labels")
    loss = model.loss(model.stream(ids), targets)
    loss.backward()
    for _, pieces in model.named_pieces():
        for piece in pieces:
            if piece.over is not None:
                piece.over.all_reduce(piece.grad)
    return loss.detach(), {name: torch.cat([piece.grad for piece in pieces]) for name, pieces in model.named_pieces()}


def logits(model, ids):
    return model.scores(model.stream(ids))
