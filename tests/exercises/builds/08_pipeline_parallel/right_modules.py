"""A right build in another style: each stage is a module of its own, a copy of its blocks, whose matrices are a subclass of nn.Linear; each
neighbour has a postman with a queue; a schedule is checked by walking back from every action, depth first."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, matrix):
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return F.linear(x, matrix.weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.matrix.drawer.append((x.detach(), dy))
        return dy @ ctx.matrix.weight, dy.flatten(0, -2).sum(0), None


class Matrix(nn.Linear):
    def forward(self, x):
        return Halves.apply(x, self.bias, self)

    def empty_drawer(self):
        taken, self.drawer = self.drawer, []
        return taken


class Stage(nn.Module):
    def __init__(self, model, numbers, first, last):
        super().__init__()
        self.training = model.training
        if first:
            self.embedding = copy.deepcopy(model.embedding)
        self.blocks = nn.ModuleDict({str(number): copy.deepcopy(model.blocks[number]) for number in numbers})
        self.blocks.training = model.training
        if last:
            self.norm, self.head = copy.deepcopy(model.norm), copy.deepcopy(model.head)
        self.matrices = [module for module in self.blocks.modules() if type(module) is nn.Linear]
        for matrix in self.matrices:
            matrix.__class__, matrix.drawer = Matrix, []
        self.runs, self.halves = {}, {}

    def forward(self, x):
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Postman:
    """Carries messages between this rank and one other."""

    def __init__(self, group, other, coming, shapes, dtype):
        self.group, self.other, self.coming, self.shapes, self.dtype = group, other, deque(coming), shapes, dtype
        self.shelf, self.under_way = {}, deque()

    def fetch(self, label):
        while label not in self.shelf:
            found = self.coming.popleft()
            parcel = torch.zeros(self.shapes[found[2]], dtype=self.dtype)
            self.group.receive(parcel, self.other)
            self.shelf[found] = parcel
        return self.shelf.pop(label)

    def bring(self, parcel):
        parcel = parcel.detach().clone(memory_format=torch.contiguous_format)
        self.under_way.append(self.group.send(parcel, self.other, asynchronous=True))

    def rest(self):
        while self.under_way:
            self.under_way.popleft().wait()


class Runner:
    def __init__(self, model, cut, group, loss):
        ranks = group.size
        if not len(cut) or len(cut) % ranks:
            raise ValueError(f"{len(cut)} stages over {ranks} ranks")
        flat = sum(map(list, cut), [])
        for place in range(max(len(flat), len(model.blocks))):
            if place >= len(flat) or place >= len(model.blocks) or flat[place] != place:
                raise ValueError(f"block {place} is not where it should be")
        self.group, self.loss, self.count, self.ranks = group, loss, len(cut), ranks
        self.tied, (self.tokens, self.width) = model.head.weight is model.embedding.weight, model.embedding.weight.shape
        self.dtype, last = model.embedding.weight.dtype, self.count - 1
        self.stages = {s: Stage(model, cut[s], s == 0, s == last) for s in range(group.rank, self.count, ranks)}

    def weights(self):
        found = {name: weight for stage in self.stages.values() for name, weight in stage.named_parameters()}
        if self.tied and "head.weight" in found:
            found["embedding.weight"] = found.pop("head.weight")
        return found

    def parents(self, kinds, kind, s, m):
        """What must be done before: on the same stage, and on a neighbour."""
        if kind == "F":
            return [("F", s - 1, m)] if s else []
        if kind == "W":
            return [("I", s, m)]
        return [("F", s, m)] + ([(kinds[s + 1, m], s + 1, m)] if s + 1 < self.count else [])

    def inspect(self, batches, schedule):
        if len(schedule) != self.ranks:
            raise ValueError(f"{self.ranks} ranks need as many lists, not {len(schedule)}")
        place, kinds, before = {}, {}, {}
        for r, actions in enumerate(schedule):
            for number, a in enumerate(actions):
                told, s = f"rank {r}: {a}", a.chunk * self.ranks + r
                if a.kind not in ("F", "B", "I", "W") or a.microbatch >= len(batches) or s >= self.count or min(a[1:]) < 0:
                    raise ValueError(f"{told} does not exist")
                key = a.kind, s, a.microbatch
                if key in place or a.kind in "BI" and key[1:] in kinds:
                    raise ValueError(f"{told} is there twice")
                own = {"B": "F", "I": "F", "W": "I"}.get(a.kind)
                if own and (own, *key[1:]) not in place:
                    raise ValueError(f"{told} comes before {own}")
                place[key], before[key] = told, (r, number)
                if a.kind in "BI":
                    kinds[key[1:]] = a.kind
        for s in range(self.count):
            for m in range(len(batches)):
                for kind in "F", "W" if kinds.get((s, m)) == "I" else "B":
                    if (kind, s, m) not in place:
                        tail = f" of chunk {s // self.ranks}" if s >= self.ranks else ""
                        raise ValueError(f"rank {s % self.ranks}: {kind}{m}{tail} is missing")
        lists = [[(a.kind, a.chunk * self.ranks + r, a.microbatch) for a in actions] for r, actions in enumerate(schedule)]
        state = {}
        for start in place:
            trail = [start]
            while trail:
                key = trail[-1]
                state[key] = "open"
                r, number = before[key]
                wanted = self.parents(kinds, *key) + lists[r][max(0, number - 1) : number]
                wanted = [each for each in wanted if state.get(each) != "closed"]
                if not wanted:
                    state[trail.pop()] = "closed"
                elif state.get(wanted[0]) == "open":
                    circle = trail[trail.index(wanted[0]) :]
                    raise ValueError("these wait for each other: " + " <- ".join(place[each] for each in circle))
                else:
                    trail.append(wanted[0])

    def post(self, batches, lists):
        """lists: by rank, (way, stage, micro-batch) of what it makes, in its order."""
        shapes, me = [(*ids.shape, self.width) for ids, _ in batches], self.group.rank
        self.postmen = {}
        for other in {(me + 1) % self.ranks, (me - 1) % self.ranks}:
            coming = [made for made in lists[other] if 0 <= made[1] + made[0] < self.count and (made[1] + made[0]) % self.ranks == me]
            self.postmen[other] = Postman(self.group, other, coming, shapes, self.dtype)

    def forward(self, s, m, batch):
        stage, x = self.stages[s], batch[0]
        if s:
            x = self.postmen[(s - 1) % self.ranks].fetch((1, s - 1, m))
            x.requires_grad = torch.is_grad_enabled()
        y = stage(x)
        if s + 1 < self.count:
            self.postmen[(s + 1) % self.ranks].bring(y)
        else:
            y = self.loss(y, batch[1])
        stage.runs[m] = x, y
        return y.detach()

    def backward(self, s, m, share):
        stage = self.stages[s]
        x, y = stage.runs.pop(m)
        dy = self.postmen[(s + 1) % self.ranks].fetch((-1, s + 1, m)) if s + 1 < self.count else torch.full_like(y, share)
        torch.autograd.backward([y], [dy])
        if s:
            self.postmen[(s - 1) % self.ranks].bring(x.grad)
        stage.halves[m] = [(matrix, *pair) for matrix in stage.matrices for pair in matrix.empty_drawer()]

    def matrices(self, s, m):
        for matrix, x, dy in self.stages[s].halves.pop(m):
            extra = torch.tensordot(dy, x, dims=([0, 1], [0, 1]))
            matrix.weight.grad = extra if matrix.weight.grad is None else matrix.weight.grad + extra

    def step(self, batches, schedule):
        count = 0
        for ids, targets in batches:
            if ids.shape != targets.shape:
                raise ValueError(f"shapes {tuple(ids.shape)} and {tuple(targets.shape)}")
            for token in ids.flatten().tolist():
                if not 0 <= token < self.tokens:
                    raise ValueError(f"there is no token {token} among {self.tokens}")
            count += int((targets != -100).sum())
        if not count:
            raise ValueError("0 targets count")
        self.inspect(batches, schedule)
        ways = {"F": 1, "B": -1, "I": -1}
        made = [[(ways[a.kind], a.chunk * self.ranks + r, a.microbatch) for a in own if a.kind != "W"] for r, own in enumerate(schedule)]
        self.post(batches, made)
        for stage in self.stages.values():
            stage.zero_grad(set_to_none=True)
        total = torch.zeros(1, dtype=self.dtype)
        for kind, m, chunk in schedule[self.group.rank]:
            s = chunk * self.ranks + self.group.rank
            if kind == "F":
                loss = self.forward(s, m, batches[m])
                total += loss if s + 1 == self.count else 0
            if kind in "BI":
                self.backward(s, m, 1 / count)
            if kind in "BW":
                self.matrices(s, m)
        for postman in self.postmen.values():
            postman.rest()
        self.meet_ends()
        self.group.all_reduce(total)
        return total.squeeze() / count

    def meet_ends(self):
        ends = {0: self.ranks - 1, self.ranks - 1: 0}
        if self.tied and self.group.rank in ends:
            other, weight = ends[self.group.rank], self.weights()["embedding.weight"]
            postman = Postman(self.group, other, [(0, 0, 0)], [weight.shape], self.dtype)
            postman.bring(weight.grad)
            weight.grad += postman.fetch((0, 0, 0))
            postman.rest()


def make_pipeline(model, cut, group, loss):
    return Runner(model, cut, group, loss)


def state(pipeline):
    return pipeline.weights()


def losses(pipeline, microbatches):
    rank, found = pipeline.group.rank, []
    pipeline.post(microbatches, [[(1, r, m) for m in range(len(microbatches))] for r in range(pipeline.ranks)])
    with torch.no_grad():
        for m, batch in enumerate(microbatches):
            found.append(pipeline.forward(rank, m, batch))
    pipeline.stages[rank].runs.clear()
    for postman in pipeline.postmen.values():
        postman.rest()
    return found if rank == pipeline.ranks - 1 else []


def step(pipeline, microbatches, schedule):
    return pipeline.step(microbatches, schedule)


def gradients(pipeline):
    return {name: weight.grad for name, weight in pipeline.weights().items()}


def gradient_norm(pipeline):
    own = pipeline.weights()
    if pipeline.tied and pipeline.group.rank:
        own.pop("embedding.weight", None)
    square = torch.stack([weight.grad.pow(2).sum() for weight in own.values()]).sum(0, keepdim=True)
    pipeline.group.all_reduce(square)
    return square.sqrt().squeeze()
