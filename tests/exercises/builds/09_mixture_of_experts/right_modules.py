"""A right build in another style: modules with parameters. Experts take the parts that come from each rank as they lie, without sorting
them again; the load is counted by an identity with a backward pass; the router's gradient and the loss travel in one flat tensor."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu


class Router(nn.Module):
    def __init__(self, weight, bias, k, renormalize):
        super().__init__()
        self.weight, self.k, self.renormalize = nn.Parameter(weight), k, renormalize
        self.register_buffer("bias", bias)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(torch.float32, x.dtype)
            logits = torch.einsum("...d,ed->...e", x.to(wide), self.weight.to(wide))
            p = F.softmax(logits, dim=-1)
            experts = torch.argsort(-(p.detach() + self.bias.to(wide)), dim=-1, stable=True).narrow(-1, 0, self.k)
            weights = p.gather(-1, experts)
            return logits, F.normalize(weights, p=1, dim=-1) if self.renormalize else weights, experts


def route(x, weight, bias, k, renormalize):
    router = Router(weight.detach(), bias, k, renormalize)
    del router.weight
    router.weight = weight  # the caller's tensor, whose gradient is asked for
    return router(x)[1:]


class Sorted:
    """The choices in the order of their experts."""

    def __init__(self, experts, number):
        flat = experts.reshape(-1)
        wrong = [expert for expert in flat.unique().tolist() if not 0 <= expert < number]
        if wrong:
            raise ValueError(f"expert {wrong[0]} of {number}")
        self.experts, self.k = torch.sort(flat, stable=True)[0], experts.shape[-1]
        self.order = torch.sort(flat, stable=True)[1]
        ends = torch.searchsorted(self.experts, torch.arange(number), right=True)
        self.counts = torch.diff(ends, prepend=ends.new_zeros(1))

    def rows(self, x):
        return torch.index_select(x, 0, torch.div(self.order, self.k, rounding_mode="floor"))

    def back(self, rows, shape):
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order))
        return rows.index_select(0, inverse).reshape(*shape, rows.shape[1])


def dispatch(x, experts, num_experts):
    choices = Sorted(experts, num_experts)
    return choices.rows(x), choices.counts


class Experts(nn.Module):
    def __init__(self, gate, up, down):
        super().__init__()
        self.gate, self.up, self.down = nn.Parameter(gate), nn.Parameter(up), nn.Parameter(down)

    def forward(self, parts):
        """parts: for each expert its rows; the results as a list."""
        matrices = zip(parts, self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        return [F.linear(silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in matrices]


def run_experts(rows, counts, gate, up, down, way):
    if way == "loop":
        experts = Experts(gate.detach(), up.detach(), down.detach())
        del experts.gate, experts.up, experts.down
        experts.gate, experts.up, experts.down = gate, up, down
        return torch.cat(experts(rows.split(counts.tolist())))
    if way == "grouped":
        ends = counts.cumsum(0).int()
        inner = silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
        return F.grouped_mm(inner, down.mT, offs=ends)
    parts = rows.split(counts.tolist())
    x = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    y = torch.bmm(silu(torch.bmm(x, gate.mT)) * torch.bmm(x, up.mT), down.mT)
    return torch.cat([block[:count] for block, count in zip(y.unbind(), counts.tolist(), strict=True)])


def auxiliary_losses(logits, experts, valid):
    weight = valid.to(logits.dtype)
    tokens = weight.sum(dim=1)
    mask = torch.stack([(experts == expert).any(-1) for expert in range(logits.shape[-1])], dim=-1).to(logits.dtype)
    f = torch.einsum("bse,bs->be", mask, weight)
    p = torch.einsum("bse,bs->be", logits.softmax(-1), weight)
    rows = (f * p).sum(-1) / torch.where(tokens > 0, tokens, 1)
    largest = logits.detach().amax(-1, keepdim=True)
    z = (largest + (logits - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
    return rows.sum() * (logits.shape[-1] / experts.shape[-1]), (z**2 * weight).sum()


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, out_sizes, in_sizes, rows):
        ctx.group, ctx.sizes = group, (in_sizes, out_sizes)
        out = rows.new_empty((sum(out_sizes), *rows.shape[1:]))
        group.all_to_all(out.split(out_sizes), rows.contiguous().split(in_sizes))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return None, None, None, AllToAll.apply(ctx.group, *ctx.sizes, gradient)


def exchange(rows, sent, received, group):
    if len(sent) != group.size or len(received) != group.size:
        raise ValueError(f"{group.size} ranks, but {len(sent)} and {len(received)} numbers.")
    if sum(sent) != rows.size(0):
        raise ValueError(f"{rows.size(0)} rows, but {sum(sent)} in the numbers.")
    return AllToAll.apply(group, list(received), list(sent), rows)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, layer, load):
        ctx.layer, ctx.load = layer, load
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.load.add_(ctx.load)
        return gradient, None, None


class Mixture(nn.Module):
    def __init__(self, weights, k, renormalize, group, replicas):
        super().__init__()
        number = weights["router.weight"].size(0)
        if number // group.size * group.size != number:
            raise ValueError(f"{number} experts do not divide by {group.size} ranks")
        if k not in range(1, number + 1):
            raise ValueError(f"k = {k}, with {number} experts")
        own = torch.arange(number).view(group.size, -1)[group.rank]
        self.router = Router(weights["router.weight"].clone(), weights["router.bias"].clone(), k, renormalize)
        self.experts = Experts(*(weights[f"experts.{name}_proj.weight"][own] for name in ("gate", "up", "down")))
        self.group, self.replicas, self.number = group, replicas, number
        self.register_buffer("load", torch.zeros(number, dtype=torch.int64))

    def named(self):
        experts = {f"experts.{name}_proj.weight": weight for name, weight in self.experts.named_parameters()}
        return {"router.weight": self.router.weight} | experts

    def forward(self, x, valid):
        if x.size(-1) != self.router.weight.size(1):
            raise ValueError(f"x is {x.size(-1)} wide, not {self.router.weight.size(1)}")
        if x.shape[:2] != valid.shape:
            raise ValueError(f"x has {list(x.shape)}, valid {list(valid.shape)}")
        logits, weights, experts = self.router(x)
        choices = Sorted(experts, self.number)
        here = torch.empty_like(choices.counts)
        share = self.number // self.group.size
        self.group.all_to_all(here.split(share), choices.counts.split(share))
        sent, blocks = choices.counts.split(share), here.view(-1, share)
        sizes = blocks.sum(1).tolist(), [int(each.sum()) for each in sent]
        arrived = AllToAll.apply(self.group, *sizes, choices.rows(x.flatten(0, 1)))
        pieces = arrived.split(blocks.flatten().tolist())  # by source, then by expert
        made = self.experts([torch.cat(pieces[expert::share]) for expert in range(share)])
        made = [part.split(blocks[:, expert].tolist()) for expert, part in enumerate(made)]
        home = torch.cat([made[expert][source] for source in range(self.group.size) for expert in range(share)])
        back = choices.back(AllToAll.apply(self.group, *reversed(sizes), home), experts.shape)
        y = torch.einsum("bskd,bsk->bsd", back.to(weights.dtype), weights).to(x.dtype)
        if torch.is_grad_enabled():
            y = Counted.apply(y, self, torch.bincount(experts[valid].view(-1), minlength=self.number))
        return y, *auxiliary_losses(logits, experts, valid)


def make_layer(weights, k, renormalize, group, replicas):
    return Mixture(weights, k, renormalize, group, replicas)


def state(layer):
    return layer.named() | {"router.bias": layer.router.bias}


def forward(layer, x, valid):
    return layer(x, valid)


def step(layer, batches, loss, balance, z):
    layer.zero_grad()
    router, total, count = layer.router.weight, 0.0, 0
    for x, targets, valid in batches:
        count += int(valid.sum())
    totals = torch.tensor([float(count)], dtype=torch.float64)
    for group in (layer.group, layer.replicas):
        group.all_reduce(totals)
    if totals[0] == 0:
        raise ValueError(f"0 tokens count in {len(batches)} micro-batches")
    for x, targets, valid in batches:
        y, balanced, squares = layer(x, valid)
        value = (loss(y, targets, valid) + balance * balanced + z * squares) / totals[0]
        value.backward()
        total += value.item()
    flat = torch.cat([router.grad.flatten(), torch.tensor([total], dtype=router.dtype)])
    for group in (layer.group, layer.replicas):
        group.all_reduce(flat)
    router.grad = flat[:-1].view_as(router)
    for weight in layer.experts.parameters():
        layer.replicas.all_reduce(weight.grad)
    return flat[-1].clone()


def gradients(layer):
    return {name: weight.grad for name, weight in layer.named().items()}


def gradient_norm(layer):
    own = torch.stack([weight.grad.norm() for weight in layer.experts.parameters()]).norm().square().view(1)
    if layer.group.rank == 0:
        own += layer.router.weight.grad.norm().square()
    layer.group.all_reduce(own)
    return own.sqrt().squeeze()


def update_bias(layer, rate):
    for group in (layer.group, layer.replicas):
        group.all_reduce(layer.load)
    load = layer.load.clone()
    layer.load.zero_()
    layer.router.bias.add_(torch.sign(load.sum() - load * layer.number), alpha=rate)
    return load
