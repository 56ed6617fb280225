"""Another right build of chapter 06: gradients are accumulated straight into the buffer that is sent (`weight.grad` is a view of it), and
hooks note which weights were used. A unit's backward pass begins with its module's full_backward_pre_hook. Nothing but buffers is sent."""

import math
from collections import namedtuple
from functools import partial
from itertools import accumulate, zip_longest

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


# Numbers start to stop of a weight, maybe none: this rank keeps them in `tensor`, at `place` in its share. cut: others keep the others.
Part = namedtuple("Part", "shape start stop tensor cut place")


class Flat:
    """Weights end to end in one tensor, `whole`, in equal shares for `shares` ranks; a replica's bucket is one share, for each of them.
    own: where this rank's share is. sum: this share of the summed gradients. used: the weights that have had a gradient."""

    def __init__(self, weights: dict[str, nn.Parameter], group, shares: int):
        self.weights, self.group, self.shares, self.used = weights, group, shares, set()
        self.sizes = [weight.numel() for weight in weights.values()]
        self.length = math.ceil(sum(self.sizes) / shares)
        self.own = slice(group.rank % shares * self.length, (group.rank % shares + 1) * self.length)
        self.whole = self.filled(weight.detach() for weight in weights.values())
        for weight, view in zip(weights.values(), self.views(self.whole)):
            weight.data = view  # the model computes with views of `whole`, whatever fills it
        self.parts, self.buffer = self.cut(self.whole[self.own]), None
        for name, weight in weights.items():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda weight, name=name: self.used.add(name))

    def prepare(self) -> None:
        """Zeros into which autograd adds."""
        self.buffer = torch.zeros(self.shares * self.length, dtype=self.whole.dtype)
        for weight, view in zip(self.weights.values(), self.views(self.buffer)):
            weight.grad = view if weight.requires_grad else None

    def views(self, flat: Tensor) -> list[Tensor]:
        return [view.view(w.shape) for view, w in zip(flat[: sum(self.sizes)].split(self.sizes), self.weights.values())]

    def filled(self, values) -> Tensor:
        flat = torch.zeros(self.shares * self.length, dtype=next(iter(self.weights.values())).dtype)
        for view, value in zip(self.views(flat), values):
            if value is not None:  # zeros stand for what this rank has not used: every rank sends the same places
                view.copy_(value)
        return flat

    def cut(self, share: Tensor) -> dict[str, Part]:
        parts = {}
        for (name, weight), begin in zip(self.weights.items(), accumulate(self.sizes, initial=-self.own.start)):
            place = slice(*(min(max(end, 0), self.length) for end in (begin, begin + weight.numel())))
            tensor = nn.Parameter(share[place], weight.requires_grad)
            parts[name] = Part(weight.shape, place.start - begin, place.stop - begin, tensor, self.shares > 1, place)
        return parts

    def start(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
        sent, self.buffer = self.buffer, None
        if self.shares > 1:
            self.sum = torch.empty(self.length, dtype=sent.dtype)
            self.work = self.group.reduce_scatter(self.sum, sent, asynchronous=True)
        else:
            self.sum, self.work = sent, self.group.all_reduce(sent, asynchronous=True)

    def gather(self) -> None:
        if self.shares > 1:
            self.group.all_gather(self.whole, self.whole[self.own])

    def give(self, tokens: int, used: list[str]) -> None:
        """Divide the sum, once, and hand it to the parts. An optimizer skips a part without a gradient."""
        self.work.wait()
        for name, part in self.parts.items():
            part.tensor.grad = self.sum[part.place] / tokens if name in used else None
        self.sum = self.work = None


class Unit(Flat):
    """An FSDP unit. `share` stays; `whole` has memory only while the unit computes. Autograd keeps views of it, as the modules do: it is
    this very storage that must be filled again."""

    def __init__(self, weights: dict[str, nn.Parameter], group, module: nn.Module, enter, recompute: bool):
        super().__init__(weights, group, group.size)
        self.share, self.enter = self.whole[self.own].clone(), enter
        self.parts = self.cut(self.share)
        self.whole.untyped_storage().resize_(0)
        if recompute:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # within the hooks: weights are there
        module.register_forward_pre_hook(lambda module, inputs: self.gather())
        module.register_forward_hook(self.left)
        module.register_full_backward_pre_hook(lambda module, gradients: enter(self))

    def gather(self) -> None:
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole[self.own].copy_(self.share)
        super().gather()

    def left(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.whole.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """After its backward pass: the weights go first; only then is there a buffer for their gradients."""
        self.whole.untyped_storage().resize_(0)
        earlier = self.sum
        self.start()
        self.work.wait()
        self.sum += 0 if earlier is None else earlier


class Parallel:
    """parts: what this rank keeps of each weight. own: the tensors that it steps. Both by name. holders: units and buckets.
    open: the unit whose backward pass runs. waiting: the buckets that have not started."""

    def __init__(self, model: nn.Module, group, optimizer, bucket_bytes=math.inf, zero=False, units=(), recompute=False):
        self.model, self.group, self.open, weights = model, group, None, dict(model.named_parameters())
        rows = [[name, list(weight.shape), str(weight.dtype), weight.requires_grad] for name, weight in weights.items()]
        for of_ranks in zip_longest(*group.gather_objects(rows)):
            if any(row != of_ranks[0] for row in of_ranks):
                raise ValueError(f"The ranks' models differ, first in {next(row for row in of_ranks if row)[0]}: {of_ranks}")
        if bucket_bytes < 1 or (missing := set(units) - dict(model.named_modules()).keys()):
            raise ValueError(f"bucket_bytes is {bucket_bytes}." if bucket_bytes < 1 else f"No modules of the model: {missing}.")
        for tensor in [*weights.values(), *model.buffers()]:
            tensor.data = tensor.data.contiguous()
            group.broadcast(tensor.data, root=0)
        inside = [{name: weight for name, weight in weights.items() if name.startswith(f"{unit}.")} for unit in units]
        rest = {name: weight for name, weight in weights.items() if name not in set().union(*inside)}
        self.parts = {name: Part(weight.shape, 0, weight.numel(), weight, False, None) for name, weight in rest.items()}
        self.units = [Unit(own, group, model.get_submodule(u), self.enter, recompute) for u, own in zip(units, inside) if own]
        self.buckets = [Flat(some, group, group.size if zero else 1) for some in in_buckets(rest, bucket_bytes)]
        self.holders = self.units + self.buckets
        self.parts |= {name: part for holder in self.holders for name, part in holder.parts.items()}
        self.own = {name: self.parts[name].tensor for name, weight in weights.items() if weight.requires_grad}
        self.optimizer = optimizer(list(self.own.values()))
        for weight in (weight for bucket in self.buckets for weight in bucket.weights.values()):
            weight.register_post_accumulate_grad_hook(self.note)

    def note(self, weight: nn.Parameter) -> None:
        """A gradient is complete. In the last micro-batch, a bucket that is full starts, after those before it."""
        for weights in self.missing:
            weights.discard(weight)
        while self.missing and not self.missing[0]:
            self.missing.pop(0), self.waiting.pop(0).start()

    def enter(self, unit: Unit | None) -> None:
        """A unit's backward pass begins, so that of the one before is over; None: so is the whole."""
        if self.open:
            self.open.reduce()
        self.open = unit
        if unit:
            unit.gather()
            unit.prepare()

    def agree(self, microbatches) -> int:
        """How many targets count. What one rank alone could refuse, all refuse: the others would wait for it."""
        strange = any(ids.shape != targets.shape for ids, targets in microbatches)
        tokens, found = sum(int((targets != -100).sum()) for _, targets in microbatches), torch.empty(self.group.size, 3).long()
        self.group.all_gather(found, torch.tensor([tokens, len(microbatches), strange]))
        tokens, counts, strange = found.T.tolist()
        if any(strange) or not sum(tokens):
            raise ValueError(f"Rank {strange.index(1)}: ids and targets differ in shape." if any(strange) else "0 targets count.")
        if self.units and len(set(counts)) > 1:
            raise ValueError(f"The ranks have {counts} micro-batches: with units all need equally many.")
        return sum(tokens)

    def assemble(self, name: str, mine: Tensor) -> Tensor:
        """A whole tensor of the ranks' parts of it: each adds its own numbers to zeros."""
        part, whole = self.parts[name], mine.new_zeros(self.parts[name].shape)
        whole.view(-1)[part.start : part.stop] = mine.detach().flatten()
        if part.cut:
            self.group.all_reduce(whole)
        return whole


def in_buckets(weights, bucket_bytes) -> list[dict[str, nn.Parameter]]:
    """Trained weights in reverse order, which is about the order in which their gradients are complete."""
    buckets = []
    for name, weight in reversed([(name, weight) for name, weight in weights.items() if weight.requires_grad]):
        if not buckets or sum(w.nbytes for w in buckets[-1].values()) + weight.nbytes > bucket_bytes:
            buckets.append({})
        buckets[-1][name] = weight
    return buckets


def make_replica(model, group, optimizer, bucket_bytes):
    return Parallel(model, group, optimizer, bucket_bytes)


def make_zero(model, group, optimizer, bucket_bytes):
    return Parallel(model, group, optimizer, bucket_bytes, zero=True)


def make_sharded(model, units, group, optimizer, recompute=False):
    return Parallel(model, group, optimizer, units=units, recompute=recompute)


def forward(parallel, ids):
    return parallel.model(ids)


def backward(parallel, microbatches, loss):
    p, tokens = parallel, parallel.agree(microbatches)
    totals, p.waiting = torch.zeros(1 + len(p.own), dtype=torch.float64), list(p.buckets)
    for holder in p.holders:
        holder.used, holder.sum = set(), None
    for bucket in p.buckets:
        bucket.prepare()
    for number, (ids, targets) in enumerate(microbatches, 1):
        early = number == len(microbatches) and not p.units  # units have operations of their own: ranks must not mix the order
        p.missing = [set(bucket.weights.values()) for bucket in p.buckets if early]
        (result := loss(p.model(ids), targets)).backward()
        totals[0] += result.detach()
        p.enter(None)
    for bucket in p.waiting:
        bucket.start()
    totals[1:] = torch.tensor([any(name in holder.used for holder in p.holders) for name in p.own])
    p.group.all_reduce(totals)
    p.used = [name for name, ranks in zip(p.own, totals[1:]) if ranks]
    for holder in p.holders:
        holder.give(tokens, p.used)
    return totals[0] / tokens


def gradients(parallel):
    return {n: parallel.assemble(n, tensor.grad) if n in parallel.used else None for n, tensor in parallel.own.items()}


def update(parallel, max_norm=None):
    squares, p = torch.zeros(2, dtype=torch.float64), parallel
    for name in p.used:
        squares[int(p.parts[name].cut)] += p.own[name].grad.square().sum()
    p.group.all_reduce(squares[1:])  # what is cut is on one rank alone, the rest is on all
    norm = squares.sum().sqrt()
    if not norm.isfinite():
        raise ValueError(f"The gradient norm is {norm.item()}: nothing was stepped.")
    for name in p.used if max_norm is not None and norm > max_norm else ():
        p.own[name].grad *= max_norm / norm
    p.optimizer.step()
    for bucket in p.buckets:
        bucket.gather()
    return norm


def state(parallel):
    held, whole = {name: parallel.optimizer.state.get(tensor) for name, tensor in parallel.own.items()}, parallel.assemble
    kept = {n: {key: whole(n, v) if torch.is_tensor(v) and v.dim() else float(v) for key, v in e.items()} for n, e in held.items() if e}
    return {"model": {name: whole(name, part.tensor) for name, part in parallel.parts.items()}, "optimizer": kept}


def load(parallel, state):
    for name in parallel.parts.keys() | state["model"].keys():
        given, part = state["model"].get(name), parallel.parts.get(name)
        if given is None or part is None or given.shape != part.shape:
            raise ValueError(f"{name} is missing in the model or in the state, or has another shape there.")
    parallel.optimizer.state.clear()
    for name, part in parallel.parts.items():
        mine = lambda whole: whole.flatten()[part.start : part.stop].view(part.tensor.shape).clone()  # noqa: B023, E731
        part.tensor.data.copy_(mine(state["model"][name]))
        if name in parallel.own and (entry := state["optimizer"].get(name)):
            parallel.optimizer.state[part.tensor] = {k: mine(v) if torch.is_tensor(v) else torch.tensor(v) for k, v in entry.items()}
    for bucket in parallel.buckets:
        bucket.gather()
