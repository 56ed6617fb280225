"""A right build in another style: functions over a namespace, and one autograd function for all that happens to a row between the router
and the weighted sum, whose backward pass is written by hand. Rows are found with nonzero() in place of a sort, choices one after the other
with argmax, and every rank learns all counts with an all-gather."""

from types import SimpleNamespace

import torch
from torch import nn

GATE, UP, DOWN = (f"experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def scored(x, weight, bias, k, renormalize):
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    with torch.autocast("cpu", enabled=False):
        logits = x.to(wide) @ weight.to(wide).T
        probabilities = torch.softmax(logits, -1)
        left, found = probabilities.detach() + bias.to(wide), []
        for _ in range(k):
            found.append(left.argmax(-1, keepdim=True))  # of equals, the first
            left = left.scatter(-1, found[-1], -torch.inf)
        experts = torch.cat(found, -1)
        weights = torch.take_along_dim(probabilities, experts, -1)
        return logits, weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts


def route(x, weight, bias, k, renormalize):
    return scored(x, weight, bias, k, renormalize)[1:]


def places(experts, num_experts):
    """Expert, token and place among the token's choices of each row, and the counts."""
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts:
        raise ValueError(f"experts {int(experts.min())} to {int(experts.max())} were chosen, and there are {num_experts}")
    marks = experts.unsqueeze(0) == torch.arange(num_experts).view(-1, 1, 1)
    expert, token, place = marks.nonzero(as_tuple=True)
    return expert, token, place, marks.sum((1, 2))


def dispatch(x, experts, num_experts):
    _, token, _, counts = places(experts, num_experts)
    return x.index_select(0, token), counts


def run_experts(rows, counts, gate, up, down, way):
    if way == "grouped":
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        by = lambda x, w: nn.functional.grouped_mm(x, w.mT, offs=ends)  # noqa: E731
        return by(nn.functional.silu(by(rows, gate)) * by(rows, up), down)
    numbers = counts.tolist()
    if way == "batched":
        filled = torch.arange(max(numbers)) < counts.unsqueeze(1)  # [E, longest]
        blocks = rows.new_zeros(*filled.shape, rows.shape[1]).masked_scatter(filled.unsqueeze(-1), rows)
        return (nn.functional.silu(blocks @ gate.mT) * (blocks @ up.mT) @ down.mT)[filled]
    made = []
    for number, part in enumerate(rows.split(numbers)):
        made.append((nn.functional.silu(part @ gate[number].T) * (part @ up[number].T)) @ down[number].T)
    return torch.cat(made)


def auxiliary_losses(logits, experts, valid):
    n, count = valid.sum(1, keepdim=True).clamp(min=1), logits.shape[-1]
    logits = torch.where(valid[..., None], logits, 0)  # once, for both losses
    chosen = torch.zeros_like(logits).scatter(-1, experts, 1.0) * valid[..., None]
    share, mean = chosen.sum(1) / n, torch.softmax(logits, -1).mul(valid[..., None]).sum(1) / n
    z = torch.logsumexp(logits, -1)[valid].pow(2).sum()
    return count / experts.shape[-1] * (n * share.detach() * mean).sum(), z


def send(rows, there, here, group):
    """there, here: how many rows go to each rank, and come from it."""
    result = torch.empty(sum(here), rows.shape[1], dtype=rows.dtype)
    group.all_to_all([*result.split(here)], [*rows.contiguous().split(there)])
    return result


class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, there, here, group):
        ctx.back = here, there, group
        return send(rows, there, here, group)

    @staticmethod
    def backward(ctx, dy):
        return send(dy, *ctx.back), None, None, None


def exchange(rows, sent, received, group):
    if {len(sent), len(received)} != {group.size}:
        raise ValueError(f"{group.size} ranks and {len(sent)} or {len(received)} numbers")
    if rows.shape[0] - sum(sent):
        raise ValueError(f"{rows.shape[0]} rows and {sum(sent)} to send")
    return Travel.apply(rows, sent, received, group)


class Elsewhere(torch.autograd.Function):
    """Rows to their experts, through them, and back."""

    @staticmethod
    def forward(ctx, rows, gate, up, down, plan):
        arrived = send(rows, plan.there, plan.here, plan.group)[plan.order]
        kept, made = [], torch.empty_like(arrived)
        for expert, (x, y) in enumerate(zip(arrived.split(plan.own), made.split(plan.own), strict=True)):
            g, u = x @ gate[expert].T, x @ up[expert].T
            torch.mm(g.sigmoid() * g * u, down[expert].T, out=y)
            kept.append((x, g, u))
        back = torch.empty_like(made)
        back[plan.order] = made
        ctx.plan, ctx.kept, ctx.matrices = plan, kept, (gate, up, down)
        return send(back, plan.here, plan.there, plan.group)

    @staticmethod
    def backward(ctx, upstream):
        plan, (gate, up, down) = ctx.plan, ctx.matrices
        dy = send(upstream, plan.there, plan.here, plan.group)[plan.order]
        gradients, dx = [torch.zeros_like(each) for each in ctx.matrices], torch.empty_like(dy)
        for expert, ((x, g, u), own, out) in enumerate(zip(ctx.kept, dy.split(plan.own), dx.split(plan.own), strict=True)):
            s = g.sigmoid()
            inner = own @ down[expert]
            gradients[2][expert] = own.T @ (s * g * u)
            dg, du = inner * u * (s + g * s * (1 - s)), inner * s * g
            gradients[0][expert], gradients[1][expert] = dg.T @ x, du.T @ x
            out.copy_(dg @ gate[expert] + du @ up[expert])
        ctx.kept = None
        plan.layer.seen += plan.load
        if not ctx.needs_input_grad[0]:
            return None, *gradients, None
        back = torch.empty_like(dx)
        back[plan.order] = dx
        return send(back, plan.here, plan.there, plan.group), *gradients, None


def make_layer(weights, k, renormalize, group, replicas):
    number, ranks = len(weights["router.bias"]), group.size
    if number % ranks:
        raise ValueError(f"{ranks} ranks, {number} experts")
    if k < 1 or k > number:
        raise ValueError(f"{k} of {number} experts")
    held = {name: (each.chunk(ranks)[group.rank] if name in (GATE, UP, DOWN) else each).clone() for name, each in weights.items()}
    for name in ("router.weight", GATE, UP, DOWN):
        held[name].requires_grad_(True)
    return SimpleNamespace(held=held, k=k, renormalize=renormalize, group=group, replicas=replicas, seen=torch.zeros(number).long())


def state(layer):
    return layer.held


def forward(layer, x, valid):
    held, group = layer.held, layer.group
    if held["router.weight"].shape[-1] != x.shape[-1]:
        raise ValueError(f"width {x.shape[-1]} for {held['router.weight'].shape[-1]}")
    if tuple(x.shape[:-1]) != tuple(valid.shape):
        raise ValueError(f"{tuple(x.shape)} and {tuple(valid.shape)}")
    logits, weights, experts = scored(x, held["router.weight"], held["router.bias"], layer.k, layer.renormalize)
    flat, number = experts.reshape(-1, layer.k), len(layer.seen)
    _, token, place, counts = places(flat, number)
    every = counts.new_empty(group.size * number)
    group.all_gather(every, counts)
    every = every.view(group.size, group.size, -1)  # [from, to, expert of that rank]
    here = every[:, group.rank]
    expert = torch.cat([torch.repeat_interleave(each) for each in here])
    plan = SimpleNamespace(
        group=group, layer=layer, order=torch.sort(expert, stable=True).indices, own=here.sum(0).tolist(),
        there=every[group.rank].sum(1).tolist(), here=here.sum(1).tolist(),
    )  # fmt: skip
    plan.load = torch.nn.functional.one_hot(experts[valid], number).sum((0, 1))
    tokens = x.reshape(-1, x.shape[-1])
    made = Elsewhere.apply(tokens[token], held[GATE], held[UP], held[DOWN], plan)
    scaled = made * weights.reshape(-1, layer.k)[token, place].unsqueeze(1)
    y = scaled.new_zeros(tokens.shape).index_add(0, token, scaled).to(x.dtype)
    return y.reshape(x.shape), *auxiliary_losses(logits, experts, valid)


def everywhere(layer, tensor):
    layer.group.all_reduce(tensor)
    layer.replicas.all_reduce(tensor)
    return tensor


def step(layer, batches, loss, balance, z):
    names = ["router.weight", GATE, UP, DOWN]
    count = everywhere(layer, torch.tensor([sum(valid.sum().item() for _, _, valid in batches)])).item()
    if not count:
        raise ValueError(f"{len(batches)} micro-batches, of which 0 tokens count")
    sums, value = [torch.zeros_like(layer.held[name]) for name in names], torch.zeros(1, dtype=torch.float64)
    for x, targets, valid in batches:
        y, first, second = forward(layer, x, valid)
        part = loss(y, targets, valid) + balance * first + z * second
        for own, new in zip(sums, torch.autograd.grad(part, [layer.held[name] for name in names]), strict=True):
            own += new
        value += part.item()
    together = everywhere(layer, torch.cat([sums[0].flatten(), value]))
    value, sums[0] = together[-1] / count, together[:-1].view_as(sums[0])
    experts = torch.cat([each.flatten() for each in sums[1:]])
    layer.replicas.all_reduce(experts)
    sums[1:] = [part.view_as(each) for part, each in zip(experts.split([each.numel() for each in sums[1:]]), sums[1:], strict=True)]
    layer.gradients = {name: each / count for name, each in zip(names, sums, strict=True)}
    return value


def gradients(layer):
    return layer.gradients


def gradient_norm(layer):
    squares = torch.stack([each.norm() ** 2 for each in layer.gradients.values()])
    own = squares[1:].sum().view(1)
    layer.group.all_reduce(own)
    return (squares[0] + own[0]) ** 0.5


def update_bias(layer, rate):
    load = everywhere(layer, layer.seen.clone())
    layer.seen.zero_()
    below = load * len(load) < load.sum()
    above = load * len(load) > load.sum()
    layer.held["router.bias"] += rate * (below.double() - above.double())
    return load
