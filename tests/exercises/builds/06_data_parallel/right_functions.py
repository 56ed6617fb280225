"""Another right build of chapter 06: FSDP as an autograd function whose backward pass is the reduce-scatter; its saved weights are gathered
again when autograd asks for them (saved_tensors_hooks). ZeRO-1 steps copies of its share; a replica's optimizer has the weights."""

import math

import torch
from torch import nn


def pack_of(unit):
    """Saved tensors that are views of the gathered weights are kept as a place."""

    def pack(tensor):
        inside = unit.whole is not None and tensor.untyped_storage()._cdata == unit.whole.untyped_storage()._cdata
        return (tensor.storage_offset(), tensor.shape, tensor.stride()) if inside else tensor

    return pack


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, unit):
        ctx.unit = unit
        return unit.gather()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.unit.scatter(gradient), None


class Again(torch.autograd.Function):
    """A unit that is run again in the backward pass."""

    @staticmethod
    def forward(ctx, share, x, unit):
        ctx.unit, ctx.random = unit, torch.get_rng_state()
        ctx.save_for_backward(x)
        unit.gather()
        result = unit.run(x, unit.views(unit.whole))
        unit.free()
        return result

    @staticmethod
    def backward(ctx, upstream):
        unit, (x,) = ctx.unit, ctx.saved_tensors
        unit.gather()
        views = [view.detach().requires_grad_(on) for view, on in zip(unit.views(unit.whole), unit.trained)]
        with torch.enable_grad(), torch.random.fork_rng([]):
            torch.set_rng_state(ctx.random)
            inner = x.detach().requires_grad_(x.requires_grad)
            result = unit.run(inner, views)
        wanted = [tensor for tensor in (inner, *views) if tensor.requires_grad]
        found = torch.autograd.grad(result, wanted, upstream, allow_unused=True)
        del result
        for view in views:
            view.data = torch.empty(0)
        unit.free()
        gradients = dict(zip(map(id, wanted), found))
        of_views = [gradients.get(id(view)) for view in views]
        unit.used |= {name for name, gradient in zip(unit.names, of_views) if gradient is not None}
        flat = torch.zeros(unit.length * unit.group.size, dtype=unit.share.dtype)
        for place, gradient in zip(unit.views(flat), of_views):
            if gradient is not None:
                place.copy_(gradient)
        of_x = gradients.get(id(inner))
        del gradients, found, of_views
        return unit.scatter(flat), of_x, None


class Cut:
    """Weights whose numbers lie end to end, a share on each rank."""

    def __init__(self, named, group):
        self.group, self.names, self.trained = group, list(named), [w.requires_grad for w in named.values()]
        self.shapes, self.sizes = [w.shape for w in named.values()], [w.numel() for w in named.values()]
        self.length = math.ceil(sum(self.sizes) / group.size)
        self.first = group.rank * self.length

    def flat(self, values):
        flat = torch.zeros(self.length * self.group.size, dtype=torch.float64)
        for view, value in zip(self.views(flat), values):
            if value is not None:
                view.copy_(value.detach())
        return flat

    def views(self, flat):
        return [view.view(shape) for view, shape in zip(flat[: sum(self.sizes)].split(self.sizes), self.shapes)]

    def mine(self, flat):
        return flat[self.first : self.first + self.length]

    def pieces(self):
        """name -> (start, stop) of the weight's numbers, and where they are in the share."""
        found, begin = {}, 0
        for name, size in zip(self.names, self.sizes):
            start, stop = max(self.first - begin, 0), min(self.first + self.length - begin, size)
            if start < stop:
                found[name] = start, stop, begin + start - self.first
            begin += size
        return found


class Unit(Cut):
    def __init__(self, module, named, group, recompute):
        super().__init__(named, group)
        self.share = nn.Parameter(self.mine(self.flat(named.values())).clone(), requires_grad=any(self.trained))
        self.module, self.original, self.whole, self.used, self.recompute = module, module.forward, None, set(), recompute
        place = {id(weight): number for number, weight in enumerate(named.values())}
        self.slots = [(m, key, place[id(w)]) for m in module.modules() for key, w in m._parameters.items() if w is not None]
        for inner, key, _ in self.slots:
            del inner._parameters[key]
        module.forward = self.forward

    def gather(self):
        if self.whole is None:
            self.whole = torch.empty(self.length * self.group.size, dtype=torch.float64)
            self.group.all_gather(self.whole, self.share.detach())
        return self.whole

    def free(self):
        if self.whole is not None:
            self.whole.untyped_storage().resize_(0)
        self.whole = None

    def scatter(self, gradient):
        self.free()
        part = torch.empty(self.length, dtype=torch.float64)
        self.group.reduce_scatter(part, gradient.contiguous())
        return part

    def run(self, x, views):
        for inner, key, number in self.slots:
            inner.__dict__[key] = views[number]
        result = self.original(x)
        for inner, key, _ in self.slots:
            inner.__dict__[key] = None
        return result

    def forward(self, x):
        if self.recompute and torch.is_grad_enabled():
            return Again.apply(self.share, x, self)
        whole = Gathered.apply(self.share, self)
        if whole.requires_grad:
            views = self.views(whole)
            for name, on, view in zip(self.names, self.trained, views):
                if on:
                    view.register_hook(lambda gradient, name=name: self.used.add(name))
            views = [view if on else view.detach() for view, on in zip(views, self.trained)]
        else:
            views = self.views(whole)
        with torch.autograd.graph.saved_tensors_hooks(pack_of(self), self.unpack):
            result = self.run(x, views)
        self.free()
        if result.requires_grad:
            result.register_hook(lambda gradient: self.others())
        return result

    def unpack(self, kept):
        return kept if isinstance(kept, torch.Tensor) else self.gather().as_strided(kept[1], kept[2], kept[0])

    def others(self):
        for unit in self.all:
            if unit is not self:
                unit.free()


class Trainer:
    def __init__(self, model, group, optimizer, kind, bucket_bytes=10**18, units=(), recompute=False):
        named = dict(model.named_parameters())
        table = [[name, list(w.shape), w.requires_grad] for name, w in named.items()]
        tables = group.gather_objects(table)
        for place in range(max(map(len, tables))):
            row = [each[place] if place < len(each) else None for each in tables]
            if row.count(row[0]) != len(row):
                raise ValueError(f"Models differ: {row}")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes {bucket_bytes}")
        modules = dict(model.named_modules())
        for unit in units:
            if unit not in modules:
                raise ValueError(f"There is no module {unit}.")
        for tensor in [*named.values(), *model.buffers()]:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            group.broadcast(copy, root=0)
            tensor.data.copy_(copy)
        self.model, self.group, self.kind, self.order = model, group, kind, list(named)
        self.trainable = [name for name, weight in named.items() if weight.requires_grad]
        self.shapes = {name: weight.shape for name, weight in named.items()}
        self.units = []
        for unit in units:
            own = {name: weight for name, weight in named.items() if name.startswith(f"{unit}.")}
            self.units.append(Unit(modules[unit], own, group, recompute))
            for name in own:
                del named[name]
        for unit in self.units:
            unit.all = self.units
        self.rest = named
        self.buckets, room = [], 0
        for name in reversed(named):
            if named[name].requires_grad:
                if room < named[name].nbytes or not self.buckets:
                    self.buckets.append([])
                    room = max(bucket_bytes, named[name].nbytes)
                self.buckets[-1].append(name)
                room -= named[name].nbytes
        self.cuts = [Cut({n: named[n] for n in bucket}, group) for bucket in self.buckets] if kind == "zero" else []
        self.pieces = {}  # name -> start, stop, tensor: what this rank steps of what is cut
        for cut in self.cuts:
            flat = cut.flat([named[name] for name in cut.names])
            for name, (start, stop, at) in cut.pieces().items():
                self.pieces[name] = start, stop, nn.Parameter(cut.mine(flat)[at : at + stop - start].clone())
        for unit in self.units:
            for name, (start, stop, at) in unit.pieces().items():
                if unit.trained[unit.names.index(name)]:
                    self.pieces[name] = start, stop, nn.Parameter(unit.share.data[at : at + stop - start])
        self.stepped = {name: piece[2] for name, piece in self.pieces.items()}
        if kind != "zero":
            self.stepped |= {name: weight for name, weight in named.items() if weight.requires_grad}
        self.optimizer = optimizer(list(self.stepped.values()))

    def is_cut(self, name):
        return name not in self.rest or self.kind == "zero" and name in self.trainable

    def backward(self, microbatches, loss):
        tokens = sum(int(t.ne(-100).sum()) for _, t in microbatches)
        bad = any(ids.shape != t.shape for ids, t in microbatches)
        told = torch.zeros(self.group.size, 3, dtype=torch.float64)
        self.group.all_gather(told, torch.tensor([tokens, bad, len(microbatches)], dtype=torch.float64))
        if told[:, 1].any():
            raise ValueError(f"ids and targets differ in shape on rank {int(told[:, 1].argmax())}")
        if not told[:, 0].sum():
            raise ValueError("no target counts")
        if self.units and told[:, 2].unique().numel() > 1:
            raise ValueError(f"numbers of micro-batches: {told[:, 2].long().tolist()}")
        total = torch.zeros(1, dtype=torch.float64)
        for name in self.rest:
            self.rest[name].grad = None
        for unit in self.units:
            unit.share.grad, unit.used = None, set()
        works, hooks, left = [], [], [set(bucket) for bucket in self.buckets]

        def start():
            number = len(works)
            gradients = [self.rest[name].grad for name in self.buckets[number]]
            if self.kind == "zero":
                flat = self.cuts[number].flat(gradients)
                part = torch.empty(self.cuts[number].length, dtype=torch.float64)
                works.append((self.group.reduce_scatter(part, flat, asynchronous=True), part))
            else:
                known = [torch.zeros_like(self.rest[n]) if g is None else g for n, g in zip(self.buckets[number], gradients)]
                flat = torch.cat([gradient.flatten() for gradient in known])
                works.append((self.group.all_reduce(flat, asynchronous=True), flat))

        def complete(name):
            def hook(weight):
                for names in left:
                    names.discard(name)
                while len(works) < len(left) and not left[len(works)]:
                    start()

            return hook

        for number, (ids, targets) in enumerate(microbatches):
            if number == len(microbatches) - 1 and not self.units:
                hooks = [self.rest[n].register_post_accumulate_grad_hook(complete(n)) for bucket in self.buckets for n in bucket]
            value = loss(self.model(ids), targets)
            value.backward()
            total += value.detach()
            for unit in self.units:
                unit.free()
        for hook in hooks:
            hook.remove()
        used = {name for name in self.rest if self.rest[name].grad is not None}.union(*(unit.used for unit in self.units))
        while len(works) < len(self.buckets):
            start()
        flags = torch.cat([total, told[:, 0].sum().view(1), torch.tensor([float(n in used) for n in self.trainable])]).double()
        flags[1] = 0
        self.group.all_reduce(flags)
        self.used = {name for name, count in zip(self.trainable, flags[2:].tolist()) if count}
        tokens = told[:, 0].sum()
        for number, (work, flat) in enumerate(works):
            work.wait()
            flat /= tokens
            if self.kind == "zero":
                for name in self.buckets[number]:
                    self.rest[name].grad = None
                for name, (start_at, stop, at) in self.cuts[number].pieces().items():
                    self.stepped[name].grad = flat[at : at + stop - start_at].clone() if name in self.used else None
            else:
                for name, own in zip(self.buckets[number], flat.split([self.rest[n].numel() for n in self.buckets[number]])):
                    self.rest[name].grad = own.view(self.shapes[name]) if name in self.used else None
        for unit in self.units:
            for name, (start_at, stop, at) in unit.pieces().items():
                if name in self.stepped:
                    self.stepped[name].grad = unit.share.grad[at : at + stop - start_at] / tokens if name in self.used else None
            unit.share.grad = None
        return flags[0] / tokens

    def whole(self, name, mine):
        if not self.is_cut(name):
            return mine.detach().clone()
        full = torch.zeros(self.shapes[name], dtype=torch.float64)
        if mine is not None:
            start, stop = self.place(name)
            full.view(-1)[start:stop] = mine.detach()
        self.group.all_reduce(full)
        return full

    def place(self, name):
        for cut in (*self.cuts, *self.units):
            if name in cut.names:
                return cut.pieces().get(name, (0, 0))[:2]

    def gradients(self):
        mine = {name: tensor.grad for name, tensor in self.stepped.items()}
        return {name: self.whole(name, mine.get(name)) if name in self.used else None for name in self.trainable}

    def update(self, max_norm):
        square = torch.zeros(1, dtype=torch.float64)
        alone = 0.0
        for name, tensor in self.stepped.items():
            if tensor.grad is not None:
                value = torch.sum(tensor.grad**2)
                square, alone = (square + value, alone) if self.is_cut(name) else (square, alone + value)
        self.group.all_reduce(square)
        norm = torch.sqrt(square[0] + alone)
        if torch.isnan(norm) or torch.isinf(norm):
            raise ValueError(f"norm {norm.item()}")
        if max_norm is not None and norm > max_norm:
            for tensor in self.stepped.values():
                if tensor.grad is not None:
                    tensor.grad.mul_(max_norm / norm)
        self.optimizer.step()
        self.spread()
        return norm

    def spread(self):
        """ZeRO: gather what was stepped, and copy it into the weights."""
        for cut in self.cuts:
            flat = cut.flat([self.rest[name] for name in cut.names])
            own = cut.mine(flat).clone()
            for name, (start, stop, at) in cut.pieces().items():
                own[at : at + stop - start] = self.stepped[name].detach()
            self.group.all_gather(flat, own)
            for name, view in zip(cut.names, cut.views(flat)):
                self.rest[name].data.copy_(view)

    def state(self):
        model = {}
        for name in self.order:
            unit = next((unit for unit in self.units if name in unit.names), None)
            if unit is None:
                model[name] = self.rest[name].detach().clone()
                continue
            piece = unit.pieces().get(name)
            model[name] = self.whole(name, None if piece is None else unit.share[piece[2] : piece[2] + piece[1] - piece[0]])
        held = {name: dict(self.optimizer.state.get(tensor, {})) for name, tensor in self.stepped.items()}
        scalars = {n: {k: None if v.dim() else v.item() for k, v in entry.items()} for n, entry in held.items() if entry}
        kinds = {}
        for told in self.group.gather_objects(scalars):
            kinds |= told
        optimizer = {}
        for name, entry in kinds.items():
            mine = held.get(name, {})
            optimizer[name] = {k: self.whole(name, mine.get(k)) if v is None else v for k, v in entry.items()}
        return {"model": model, "optimizer": optimizer}

    def load(self, state):
        for name in [*self.order, *state["model"]]:
            if name not in self.shapes or name not in state["model"] or state["model"][name].shape != self.shapes[name]:
                raise ValueError(f"The state does not fit: {name}")
        with torch.no_grad():
            for name, weight in self.rest.items():
                weight.copy_(state["model"][name])
            for unit in self.units:
                unit.share.copy_(unit.mine(unit.flat([state["model"][name] for name in unit.names])))
        self.optimizer.state.clear()
        for name, tensor in self.stepped.items():
            start, stop = self.place(name) if self.is_cut(name) else (0, tensor.numel())
            if self.kind == "zero":
                tensor.data.copy_(state["model"][name].flatten()[start:stop])
            cut = lambda whole: whole.flatten()[start:stop].view_as(tensor).clone()  # noqa: E731, B023
            entry = state["optimizer"].get(name, {})
            if entry:
                self.optimizer.state[tensor] = {k: cut(v) if isinstance(v, torch.Tensor) else torch.tensor(v) for k, v in entry.items()}


def make_replica(model, group, optimizer, bucket_bytes):
    return Trainer(model, group, optimizer, "replica", bucket_bytes)


def make_zero(model, group, optimizer, bucket_bytes):
    return Trainer(model, group, optimizer, "zero", bucket_bytes)


def make_sharded(model, units, group, optimizer, recompute=False):
    return Trainer(model, group, optimizer, "sharded", units=units, recompute=recompute)


def forward(parallel, ids):
    return parallel.model(ids)


def backward(parallel, microbatches, loss):
    return parallel.backward(microbatches, loss)


def gradients(parallel):
    return parallel.gradients()


def update(parallel, max_norm=None):
    return parallel.update(max_norm)


def state(parallel):
    return parallel.state()


def load(parallel, state):
    parallel.load(state)
