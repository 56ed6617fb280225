"""Chapter 08. A pipeline that runs any valid schedule, from scratch: a table of graphs, and a queue of messages from each neighbour.

    F   receive activations, a leaf; run the chunk; keep (leaf, result); send the result
    B   receive the result's gradient; run backward from the result; send the leaf's gradient
    I   the same, where matrices leave (weight, x, dy) in a list instead of a gradient;    W   dy^T x for all in the list

A message has no name, but both ends know the schedule: the n-th message from one rank to another is the n-th of the sender's results for
it. Who needs a message takes messages off the queue, and puts away what is for later.

(Huang et al. 2019, section 2; Narayanan et al. 2021, section 2.2; I and W: Qi et al. 2023, section 4.)
"""

from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.parallel.pipeline.schedules import Action


class Shape(NamedTuple):
    """Stage s is chunk s // ranks of rank s % ranks. A message is (1 for activations or -1 for gradients, its stage, its micro-batch)."""

    ranks: int
    chunks: int

    def message(self, rank: int, action: Action, sent: bool) -> tuple[tuple, int] | None:
        """What an action sends and to whom, or what it needs and from whom."""
        stage, way = action.chunk * self.ranks + rank, {"F": 1, "W": 0}.get(action.kind, -1)
        other = stage + way if sent else stage - way
        if way == 0 or not 0 <= other < self.ranks * self.chunks:
            return None
        return (way, stage if sent else other, action.microbatch), other % self.ranks


class LaterWeight(torch.autograd.Function):
    """x W^T, whose backward pass gives x its gradient and leaves the weight's for later. Autograd sees tensors only, so not the weight."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: nn.Linear, found: list) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.found = linear, found
        return F.linear(x, linear.weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        ctx.found.append((ctx.linear.weight, *ctx.saved_tensors, dy))
        return dy @ ctx.linear.weight, None, None


class Pipeline:
    """This rank's stages.

    parts: the modules of each chunk, in order, by their names in the model.
    graphs: (chunk, micro-batch) -> what F received, a leaf or None, and what it made.
    later: (chunk, micro-batch) -> what W needs; `found`: where the matrices leave it while a backward pass runs.
    coming: rank -> the messages that it sends to this one, in its order; arrived: those that came before they were needed.
    """

    def __init__(self, model: nn.Module, cut, group, loss):
        require_cut(cut, len(model.blocks), group.size)
        self.group, self.loss, self.shape = group, loss, Shape(group.size, len(cut) // group.size)
        self.width, self.vocabulary = model.embedding.embedding_dim, model.embedding.num_embeddings
        self.first, self.last = group.rank == 0, group.rank == group.size - 1
        self.tied, self.dtype = model.head.weight is model.embedding.weight, model.embedding.weight.dtype
        self.parts = [{f"blocks.{number}": model.blocks[number] for number in numbers} for numbers in cut[group.rank :: group.size]]
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []
        modules = [module for chunk in self.parts for block in chunk.values() for module in block.modules()]
        for linear in (module for module in modules if isinstance(module, nn.Linear)):
            linear.forward = lambda x, linear=linear: LaterWeight.apply(x, linear, self.found) + linear.bias
        if self.first:
            self.parts[0] = {"embedding": model.embedding} | self.parts[0]
        if self.last:
            self.parts[-1] |= {"norm": model.norm, "head": model.head}
        named = [part for chunk in self.parts for part in chunk.items()]
        self.weights = {f"{part}.{name}": weight for part, module in named for name, weight in module.named_parameters()}
        if self.tied and self.last:
            self.weights["embedding.weight"] = self.weights.pop("head.weight")

    def start(self, microbatches, schedule) -> None:
        self.microbatches, self.works = microbatches, []
        self.graphs, self.later, self.arrived, self.coming = {}, {}, {}, {}
        for rank, actions in enumerate(schedule):
            made = filter(None, [self.shape.message(rank, action, sent=True) for action in actions])
            self.coming[rank] = iter([message for message, to in made if to == self.group.rank])

    def take(self, message: tuple, source: int) -> Tensor:
        while message not in self.arrived:
            coming = next(self.coming[source])
            ids, _ = self.microbatches[coming[-1]]
            self.arrived[coming] = torch.empty(*ids.shape, self.width, dtype=self.dtype)  # a new one: others are in graphs
            self.group.receive(self.arrived[coming], source)
        return self.arrived.pop(message)

    def send(self, tensor: Tensor, to: int) -> None:
        tensor = tensor.detach().contiguous()
        self.works.append((self.group.send(tensor, to, asynchronous=True), tensor))  # kept until it has been received

    def finish(self) -> None:
        while self.works:
            self.works.pop()[0].wait()

    def forward(self, action: Action) -> Tensor | float:  # the loss, on the last stage
        ids, targets = self.microbatches[action.microbatch]
        needed, made = (self.shape.message(self.group.rank, action, sent) for sent in (False, True))
        received = self.take(*needed).requires_grad_(torch.is_grad_enabled()) if needed else None
        x = ids if received is None else received
        for module in self.parts[action.chunk].values():
            x = module(x)
        if made:
            self.send(x, made[1])
        else:
            x = self.loss(x, targets)
        self.graphs[action.chunk, action.microbatch] = received, x
        return 0.0 if made else x.detach()

    def backward(self, action: Action) -> None:
        at = action.chunk, action.microbatch
        received, result = self.graphs.pop(at)
        needed, made = (self.shape.message(self.group.rank, action, sent) for sent in (False, True))
        gradient = self.take(*needed) if needed else torch.ones_like(result) / self.tokens  # the one division, by all tokens
        result.backward(gradient)
        if made:
            self.send(received.grad, made[1])
        self.later[at] = self.found[:]
        self.found.clear()

    @torch.no_grad()
    def weight_gradients(self, action: Action) -> None:
        for weight, x, dy in self.later.pop((action.chunk, action.microbatch)):
            gradient = dy.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    def step(self, microbatches, schedule) -> Tensor:
        require_batches(microbatches, self.vocabulary)
        require_schedule(schedule, len(microbatches), self.shape)
        self.start(microbatches, schedule)
        self.tokens = sum(int((targets != -100).sum()) for _, targets in microbatches)
        total = torch.zeros(1, dtype=self.dtype)
        for weight in self.weights.values():
            weight.grad = None
        for action in schedule[self.group.rank]:
            if action.kind == "F":
                total += self.forward(action)
            if action.kind in "BI":
                self.backward(action)
            if action.kind in "BW":
                self.weight_gradients(action)
        self.finish()
        if self.tied and (self.first or self.last):
            self.share_ends()
        self.group.all_reduce(total)
        return total[0] / self.tokens

    def share_ends(self) -> None:
        """First and last rank send each other the gradient of the weight that both hold, and add."""
        own, other = self.weights["embedding.weight"].grad, self.group.size - 1 if self.first else 0
        theirs = torch.empty_like(own)
        self.send(own, other)
        self.group.receive(theirs, other)
        self.finish()
        self.weights["embedding.weight"].grad = own + theirs

    @torch.no_grad()
    def losses(self, microbatches) -> list[Tensor]:
        actions = [Action("F", number) for number in range(len(microbatches))]
        self.start(microbatches, [actions] * self.group.size)
        results = [self.forward(action) for action in actions]
        self.graphs.clear()
        self.finish()
        return results if self.last else []


def require_cut(cut, blocks: int, ranks: int) -> None:
    if not cut or len(cut) % ranks:
        raise ValueError(f"{len(cut)} stages cannot be shared out over {ranks} ranks: take a multiple.")
    named = [number for numbers in cut for number in numbers]
    for block, number in zip_longest(range(blocks), named):
        if block != number:
            raise ValueError(f"The cut names block {number} where block {block} of {blocks} comes: name each once, in order.")


def require_batches(microbatches, vocabulary: int) -> None:
    for number, (ids, targets) in enumerate(microbatches):
        if ids.shape != targets.shape:
            raise ValueError(f"Micro-batch {number} has ids of shape {list(ids.shape)} and targets of shape {list(targets.shape)}.")
        if len(outside := ids[(ids < 0) | (ids >= vocabulary)]):
            raise ValueError(f"Micro-batch {number} holds the id {int(outside[0])}, and the vocabulary has {vocabulary}.")
    if all((targets == -100).all() for _, targets in microbatches):
        raise ValueError(f"Of {len(microbatches)} micro-batches 0 targets count, so that there is nothing to divide by.")


def require_schedule(schedule, microbatches: int, shape: Shape) -> None:
    """Each rank's list by itself; then all lists together, run without numbers."""
    if len(schedule) != shape.ranks:
        raise ValueError(f"The schedule has {len(schedule)} lists, and there are {shape.ranks} ranks.")
    for rank, actions in enumerate(schedule):
        require_list(rank, actions, microbatches, shape.chunks)
    places, sent, before = [0] * shape.ranks, set(), None
    while places != before:
        before = places[:]
        for rank, actions in enumerate(schedule):
            while places[rank] < len(actions):
                needed, made = (shape.message(rank, actions[places[rank]], sends) for sends in (False, True))
                if needed and needed[0] not in sent:
                    break
                sent |= {made[0]} if made else set()
                places[rank] += 1
    if stuck := [f"rank {rank} in {actions[places[rank]]}" for rank, actions in enumerate(schedule) if places[rank] < len(actions)]:
        raise ValueError(f"Ranks wait for each other: {', '.join(stuck)}.")


def require_list(rank: int, actions, microbatches: int, chunks: int) -> None:
    done = set()
    for action in actions:
        kind, fault = action.kind, ""
        if kind not in {"F", "B", "I", "W"}:
            fault = "there is no such kind"
        elif action.microbatch not in range(microbatches) or action.chunk not in range(chunks):
            fault = f"there are {microbatches} micro-batches and {chunks} chunks"
        elif action in done or action._replace(kind={"B": "I", "I": "B"}.get(kind)) in done:
            fault = "it has been done"
        elif kind != "F" and action._replace(kind="I" if kind == "W" else "F") not in done:
            fault = "what it needs has not been done"
        if fault:
            raise ValueError(f"rank {rank} cannot do {action}: {fault}.")
        done.add(action)
    for forward in (Action("F", microbatch, chunk) for microbatch in range(microbatches) for chunk in range(chunks)):
        for action in (forward, forward._replace(kind="W" if forward._replace(kind="I") in done else "B")):
            if action not in done:
                raise ValueError(f"rank {rank} never does {action}.")


def make_pipeline(model, cut, group, loss):
    return Pipeline(model, cut, group, loss)


def state(pipeline):
    return pipeline.weights


def losses(pipeline, microbatches):
    return pipeline.losses(microbatches)


def step(pipeline, microbatches, schedule):
    return pipeline.step(microbatches, schedule)


def gradients(pipeline):
    return {name: weight.grad for name, weight in pipeline.weights.items()}


def gradient_norm(pipeline):
    counted = [weight.grad for name, weight in pipeline.weights.items() if pipeline.first or name != "embedding.weight"]
    total = sum(gradient.square().sum() for gradient in counted).reshape(1)
    pipeline.group.all_reduce(total)
    return total[0].sqrt()
