"""Chapter 07. A whole LLaMA under tensor and sequence parallelism, from scratch: the layout is data, and the rest follows from it.

`plan` says which rows and columns of each weight a rank holds, and `partial` which gradients are a sum over ranks. What is left is a plain
transformer over this rank's heads, features and tokens, with an operator in front of each sublayer and one behind it:

                            in front (enter)                                behind (leave)
    tensor parallelism      f: identity, backward all-reduce                g: all-reduce, backward identity
    sequence parallelism    all-gather, backward reduce-scatter             reduce-scatter, backward all-gather

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.config import ModelConfig
from shared.model.rope import apply_rope, rope_tables
from shared.parallel.comm.communicator import Communicator

# Collectives as functions: a new tensor comes out. The sequence is dimension 1, and a communicator joins along dimension 0.


def summed(x: Tensor, group: Communicator) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def gathered(part: Tensor, group: Communicator) -> Tensor:
    whole = part.new_empty(part.shape[1] * group.size, part.shape[0], *part.shape[2:])
    group.all_gather(whole, part.transpose(0, 1).contiguous())
    return whole.transpose(0, 1).contiguous()  # once here, not in each matrix that reads it


def scattered(whole: Tensor, group: Communicator) -> Tensor:
    first = whole.transpose(0, 1).contiguous()
    part = first.new_empty(len(first) // group.size, *first.shape[1:])
    group.reduce_scatter(part, first)
    return part.transpose(0, 1).contiguous()


def same(x: Tensor, group: Communicator) -> Tensor:
    return x.view_as(x)


class Operator(torch.autograd.Function):
    """A collective forward, another one backward."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable, group: Communicator) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.back(gradient, ctx.group), None, None, None


def plan(config: ModelConfig, rank: int, ranks: int) -> dict[str, tuple[Tensor, ...]]:
    """Weight -> the indices in the whole of what a rank holds, one tensor for each dimension."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim

    def mine(size: int) -> Tensor:
        return torch.arange(size).tensor_split(ranks)[rank]  # the vocabulary need not divide; the rest does

    everything, tokens, features = torch.arange(width), mine(config.vocab_size), mine(inner)
    queries, keys = mine(config.num_attention_heads * head), mine(config.num_key_value_heads * head)
    if config.num_key_value_heads < ranks:  # several ranks hold the same head
        first = rank * config.num_key_value_heads // ranks * head
        keys = torch.arange(first, first + head)
    gate_and_up = torch.cat([features, inner + features])  # this rank's features of both: the product of the two is feature by feature
    found = {"embedding.weight": (tokens, everything), "final_norm.weight": (everything,), "head.weight": (tokens, everything)}
    for number in range(config.num_hidden_layers):
        block = f"blocks.{number}"
        for norm in ("attention_norm", "feed_forward_norm"):
            found[f"{block}.{norm}.weight"] = (everything,)
        columns = {"attention.q_proj": queries, "attention.k_proj": keys, "attention.v_proj": keys}
        columns["feed_forward.gate_up_proj"] = gate_and_up
        for name, rows in columns.items():
            found[f"{block}.{name}.weight"], found[f"{block}.{name}.bias"] = (rows, everything), (rows,)
        for name, inputs in {"attention.o_proj": queries, "feed_forward.down_proj": features}.items():
            found[f"{block}.{name}.weight"], found[f"{block}.{name}.bias"] = (everything, inputs), (everything,)
    return found


class Model:
    """This rank's part of the model.

    parts: weight -> this rank's part, a leaf that requires a gradient.
    partial: the weights of which each rank has a part of the gradient -> the ranks over which it is summed.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], group: Communicator, by_sequence: bool):
        require_even(config, group.size)
        self.config, self.group, self.by_sequence = config, group, by_sequence
        self.layout = plan(config, group.rank, group.size)
        self.parts = {}
        for name, indices in self.layout.items():
            part = weights[name]
            for dimension, index in enumerate(indices):
                part = part.index_select(dimension, index)  # copies, so that the whole can be freed
            self.parts[name] = part.requires_grad_()
        copies = None
        if config.num_key_value_heads < group.size:
            each = group.size // config.num_key_value_heads
            copies = group.split("copies", [range(first, first + each) for first in range(0, group.size, each)])
        self.partial = {}
        for name in self.parts:
            if ".k_proj." in name or ".v_proj." in name:
                self.partial[name] = copies  # each copy of a head serves other query heads
            elif by_sequence and ("norm." in name or name.endswith(("o_proj.bias", "down_proj.bias"))):
                self.partial[name] = group  # computed on this rank's positions alone

    def enter(self, x: Tensor) -> Tensor:
        """In front of matrices of which each rank computes some outputs."""
        return Operator.apply(x, *((gathered, scattered) if self.by_sequence else (same, summed)), self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Behind a matrix of which each rank computes a summand of all outputs."""
        return Operator.apply(x, *((scattered, gathered) if self.by_sequence else (summed, same)), self.group)

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the ranks, with which all of them compute the same."""
        return Operator.apply(x, summed, same, self.group)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.parts[f"{name}.weight"], self.parts[f"{name}.bias"])

    def row_linear(self, name: str, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.parts[f"{name}.weight"])) + self.parts[f"{name}.bias"]  # the bias once, to the sum

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.parts[f"{name}.weight"], self.config.norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, D], or this rank's positions of it."""
        self.require_tokens("ids", ids)
        tokens = self.layout["embedding.weight"][0]
        elsewhere = (ids < tokens[0]) | (ids > tokens[-1])
        rows = F.embedding((ids - tokens[0]).masked_fill(elsewhere, 0), self.parts["embedding.weight"])
        return self.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def attention(self, layer: int, x: Tensor) -> Tensor:
        name, x = f"blocks.{layer}.attention", self.enter(x)
        tables = rope_tables(self.config, torch.arange(x.shape[1]), x.shape[1])
        q, k, v = (self.linear(f"{name}.{each}_proj", x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for each in "qkv")
        q, k = (apply_rope(each, tables.cos.to(x.dtype), tables.sin.to(x.dtype)) for each in (q, k))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.row_linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"blocks.{layer}.feed_forward"
        gate, up = self.linear(f"{name}.gate_up_proj", self.enter(x)).chunk(2, dim=-1)
        return self.row_linear(f"{name}.down_proj", F.silu(gate) * up)

    def hidden(self, ids: Tensor) -> Tensor:
        """What the head reads: [B, S, D], or this rank's positions of it."""
        if self.by_sequence and ids.shape[1] % self.group.size:
            raise ValueError(f"Sequence parallelism over {self.group.size} ranks cannot cut {ids.shape[1]} positions: pad the sequence.")
        x = self.embed(ids)
        for layer in range(self.config.num_hidden_layers):
            x = x + self.attention(layer, self.norm(f"blocks.{layer}.attention_norm", x))
            x = x + self.feed_forward(layer, self.norm(f"blocks.{layer}.feed_forward_norm", x))
        return self.norm("final_norm", x)

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, D] -> the logits of this rank's tokens."""
        return F.linear(self.enter(x), self.parts["head.weight"])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy: three numbers of each position travel, whatever the vocabulary."""
        counted = targets != -100
        logits, tokens = self.logits(x), self.layout["head.weight"][0]
        largest = logits.detach().amax(dim=-1)
        self.group.all_reduce(largest, op="max")
        sums = (logits - largest.unsqueeze(-1)).exp().sum(dim=-1)
        here = (targets >= tokens[0]) & (targets <= tokens[-1])
        chosen = logits.gather(-1, (targets - tokens[0]).masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1)
        sums, chosen = self.over_ranks(torch.stack([sums, chosen.masked_fill(~here, 0)])).unbind()
        return (sums.log() + largest - chosen).masked_fill(~counted, 0).sum()

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        found = dict(zip(self.parts, torch.autograd.grad(loss, list(self.parts.values())), strict=True))
        for group in dict.fromkeys(filter(None, self.partial.values())):  # in one order on all ranks, each group's in one call
            names = [name for name, over in self.partial.items() if over is group]
            flat = torch.cat([found[name].flatten() for name in names])
            group.all_reduce(flat)
            sums = flat.split([found[name].numel() for name in names])
            found |= {name: total.view_as(found[name]) for name, total in zip(names, sums, strict=True)}
        return found

    def require_tokens(self, what: str, ids: Tensor) -> None:
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(outside):
            raise ValueError(f"{what} hold the token {int(outside[0])}, and the vocabulary has {self.config.vocab_size}.")


def require_even(config: ModelConfig, ranks: int) -> None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    for name, size in (("num_attention_heads", heads), ("intermediate_size", config.intermediate_size)):
        if size % ranks:
            raise ValueError(f"{ranks} ranks cannot share {name} {size} evenly: take a number of ranks that divides it.")
    if groups % ranks and ranks % groups:
        raise ValueError(f"{ranks} ranks and num_key_value_heads {groups}: one must divide the other.")
    if config.vocab_size < ranks:
        raise ValueError(f"{ranks} ranks cannot share a vocabulary of {config.vocab_size} tokens.")


def make_model(config, weights, group, sequence_parallel=False):
    return Model(config, weights, group, sequence_parallel)


def state(model):
    return model.parts


def layout(model):
    return model.layout


def feed_forward(model, layer, x):
    return model.feed_forward(layer, x)


def attention(model, layer, x):
    return model.attention(layer, x)


def embed(model, ids):
    return model.embed(ids)


def head_loss(model, x, targets):
    model.require_tokens("targets", targets[targets != -100])
    return model.loss(x, targets)


def loss_and_gradients(model, ids, targets):
    model.require_tokens("targets", targets[targets != -100])  # before anything is sent
    loss = model.loss(model.hidden(ids), targets)
    return loss.detach(), model.gradients(loss)


def logits(model, ids):
    return model.logits(model.hidden(ids))
