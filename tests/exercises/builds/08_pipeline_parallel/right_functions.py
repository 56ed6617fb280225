"""A right build in another style: functions over namespaces. The modules stay as they are: I asks autograd for the gradients of what the
matrices make and read, from hooks, and W multiplies them. Receives are started ahead of time, one from each neighbour, so a message may
already be under way when an action needs it. The check of a schedule draws the graph of all actions and sorts it."""

from collections import deque
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace

import torch
from torch import nn

KINDS = {"F": 1, "B": -1, "I": -1, "W": 0}


def make_pipeline(model, cut, group, loss):
    ranks, rank = group.size, group.rank
    if len(cut) == 0 or len(cut) % ranks:
        raise ValueError(f"{ranks} ranks, {len(cut)} stages")
    expected = 0
    for numbers in cut:
        for number in numbers:
            if number != expected:
                raise ValueError(f"block {expected} is missing in the cut")
            expected += 1
    if expected != len(model.blocks):
        raise ValueError(f"block {expected} is missing in the cut")
    p = SimpleNamespace(group=group, loss=loss, rank=rank, ranks=ranks, stages=len(cut), cut=list(cut), later=None)
    p.embedding = model.embedding if rank == 0 else None
    p.norm, p.head = (model.norm, model.head) if rank == ranks - 1 else (None, None)
    p.tied, p.tokens, p.width = model.head.weight is model.embedding.weight, *model.embedding.weight.shape
    p.blocks, p.weights, p.dtype = {}, {}, model.embedding.weight.dtype
    for stage in range(rank, len(cut), ranks):
        for number in cut[stage]:
            p.blocks[number] = model.blocks[number]
            for name, weight in p.blocks[number].named_parameters():
                p.weights[f"blocks.{number}.{name}"] = weight
    for part in ("embedding", "norm", "head"):
        for name, weight in getattr(p, part).named_parameters() if getattr(p, part) is not None else ():
            p.weights["embedding.weight" if p.tied and part == "head" else f"{part}.{name}"] = weight
    p.matrices = {id(m.weight): m.weight for block in p.blocks.values() for m in block.modules() if isinstance(m, nn.Linear)}
    for block in p.blocks.values():
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(remember(p))
    return p


def remember(p):
    def hook(linear, inputs, y):
        if p.later is not None:
            p.later.append((linear.weight, inputs[0].detach(), y))

    return hook


def stage_of(p, action, rank=None):
    return action.chunk * p.ranks + (p.rank if rank is None else rank)


def compute(p, stage, x):
    x = p.embedding(x) if stage == 0 else x
    for number in p.cut[stage]:
        x = p.blocks[number](x)
    return p.head(p.norm(x)) if stage == p.stages - 1 else x


def to_rank(p, action, rank):
    """The rank to which an action of `rank` sends; None where it does not."""
    other = stage_of(p, action, rank) + KINDS[action.kind]
    return other % p.ranks if KINDS[action.kind] and 0 <= other < p.stages else None


def open_links(p, batches, schedule):
    """For each other rank a queue of what comes from it; a receive of the first is under way."""
    p.batches, p.works, p.here, p.queues, p.posted = batches, [], {}, {}, {}
    for rank, actions in enumerate(schedule):
        mine = [a for a in actions if to_rank(p, a, rank) == p.rank and rank != p.rank]
        p.queues[rank] = deque((KINDS[a.kind], stage_of(p, a, rank) + KINDS[a.kind], a.microbatch) for a in mine)
        post(p, rank)


def post(p, source):
    if p.queues[source]:
        key = p.queues[source].popleft()
        tensor = torch.empty(p.batches[key[2]][0].numel(), p.width, dtype=p.dtype)
        p.posted[source] = key, tensor, p.group.receive(tensor, source, asynchronous=True)
    else:
        p.posted.pop(source, None)


def get(p, way, stage, number):
    source = (stage - way) % p.ranks
    while (way, stage, number) not in p.here:
        key, tensor, work = p.posted[source]
        work.wait()
        p.here[key] = tensor.view(*p.batches[key[2]][0].shape, p.width)
        post(p, source)
    return p.here.pop((way, stage, number))


def put(p, tensor, to):
    p.works.append(p.group.send(tensor.detach().contiguous(), to, asynchronous=True))


def close_links(p):
    for work in p.works:
        work.wait()
    del p.works, p.posted, p.here


def losses(p, batches):
    found = []
    with torch.no_grad():
        p.batches, p.works, p.here, p.posted = batches, [], {}, {}
        p.queues = {p.rank - 1: deque((1, p.rank, number) for number in range(len(batches)))} if p.rank else {}
        for source in p.queues:
            post(p, source)
        for number, (ids, targets) in enumerate(batches):
            y = compute(p, p.rank, get(p, 1, p.rank, number) if p.rank else ids)
            if p.rank == p.ranks - 1:
                found.append(p.loss(y, targets))
            else:
                put(p, y, p.rank + 1)
        close_links(p)
    return found


def step(p, batches, schedule):
    counted = refuse(p, batches, schedule)
    p.gradients = {name: torch.zeros_like(weight) for name, weight in p.weights.items()}
    by_weight = {id(p.weights[name]): gradient for name, gradient in p.gradients.items()}
    open_links(p, batches, schedule)
    graphs, waiting, total = {}, {}, torch.zeros(1, dtype=p.dtype)
    for action in schedule[p.rank]:
        stage, number = stage_of(p, action), action.microbatch
        ids, targets = batches[number]
        if action.kind == "F":
            x = ids if stage == 0 else get(p, 1, stage, number).requires_grad_()
            p.later = []
            y = compute(p, stage, x)
            if stage == p.stages - 1:
                y = p.loss(y, targets) / counted
                total += y.detach()
            else:
                put(p, y, (p.rank + 1) % p.ranks)
            graphs[stage, number], p.later = (x, y, p.later), None
            del x, y
            continue
        if action.kind in "BI":
            waiting[stage, number] = inputs_backward(p, graphs.pop((stage, number)), by_weight, stage, number)
        if action.kind in "BW":
            for weight, x, dy in waiting.pop((stage, number)):
                by_weight[id(weight)] += torch.einsum("...o,...i->oi", dy, x)
    close_links(p)
    if p.tied and p.rank in (0, p.ranks - 1):
        other, own = p.ranks - 1 - p.rank, p.gradients["embedding.weight"]
        work, theirs = p.group.send(own.clone(), other, asynchronous=True), torch.empty_like(own)
        p.group.receive(theirs, other)
        work.wait()
        own += theirs
    p.group.broadcast(total, p.ranks - 1)
    return total[0]


def inputs_backward(p, graph, by_weight, stage, number):
    """The gradients of all but the matrices, which are added or sent; and what W needs."""
    x, y, later = graph
    gradient = None if stage == p.stages - 1 else get(p, -1, stage, number)
    others = {id(weight): weight for weight in p.weights.values() if id(weight) not in p.matrices}
    leaves = list(others.values()) + ([x] if stage else [])
    found = torch.autograd.grad(y, [*leaves, *(out for _, _, out in later)], gradient, allow_unused=True)
    for weight, one in zip(others.values(), found, strict=False):
        if one is not None:
            by_weight[id(weight)] += one
    if stage:
        put(p, found[len(leaves) - 1], (p.rank - 1) % p.ranks)
    return [(weight, x, dy) for (weight, x, _), dy in zip(later, found[len(leaves) :], strict=True)]


def refuse(p, batches, schedule):
    for ids, targets in batches:
        if tuple(ids.shape) != tuple(targets.shape):
            raise ValueError(f"{tuple(ids.shape)} ids, {tuple(targets.shape)} targets")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= p.tokens:
            raise ValueError(f"id {low if low < 0 else high} of {p.tokens}")
    counted = sum(int(targets.ne(-100).sum()) for _, targets in batches)
    if counted == 0:
        raise ValueError("0 targets count")
    if len(schedule) != p.ranks:
        raise ValueError(f"{len(schedule)} lists for {p.ranks} ranks")
    before, names = {}, {}
    for rank, actions in enumerate(schedule):
        last = None
        for action in actions:
            stage = stage_of(p, action, rank)
            node, says = (action.kind, stage, action.microbatch), f"rank {rank}, {action}"
            if action.kind not in KINDS or not 0 <= action.microbatch < len(batches) or not 0 <= action.chunk < p.stages // p.ranks:
                raise ValueError(f"{says}: unknown")
            other = {"B": "I", "I": "B"}.get(action.kind)
            if node in before or (other, *node[1:]) in before:
                raise ValueError(f"{says}: twice")
            need = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
            if need and (need, *node[1:]) not in before:
                raise ValueError(f"{says}: too early")
            before[node], names[node] = [last] if last else [], says
            last = node
        for number in range(len(batches)):
            for chunk in range(p.stages // p.ranks):
                at, of = (chunk * p.ranks + rank, number), f" of chunk {chunk}" if chunk else ""
                for kind in ("F", "W" if ("I", *at) in before else "B"):
                    if (kind, *at) not in before:
                        raise ValueError(f"rank {rank}, {kind}{number}{of}: missing")
    for kind, stage, number in list(before):
        if kind == "F" and stage:
            before[kind, stage, number].append(("F", stage - 1, number))
        if kind in "BI" and stage < p.stages - 1:
            behind = "B" if ("B", stage + 1, number) in before else "I"
            before[kind, stage, number].append((behind, stage + 1, number))
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise ValueError("a ring: " + "; ".join(names[node] for node in error.args[1])) from None
    return counted


def state(p):
    return p.weights


def gradients(p):
    return p.gradients


def gradient_norm(p):
    own = [g.flatten() for name, g in p.gradients.items() if not (p.tied and p.rank and name == "embedding.weight")]
    square = torch.cat(own).square().sum().reshape(1)
    p.group.all_reduce(square)
    return square.sqrt()[0]
