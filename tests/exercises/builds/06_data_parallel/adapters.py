"""The build of chapter 06: DDP, ZeRO-1 and FSDP, yours from an empty file. About four hours.

    course check 06.build                all stages; course check 06.build.start: one
    course hint 06.build.start           three hints for each stage
    course reset 06.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay
thin: a line or two each that call what you wrote. A stage whose functions still raise NotImplementedError is NOT ATTEMPTED, so you can work
from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 05, and what you wrote in exercises.py (copy it here); of this chapter's core only
`shared.parallel.comm`. The other modules of `shared.parallel`, torch.nn.parallel and torch.distributed may not be imported. The checks run
in float64, with ranks as threads and different data on each, and compare with one process to 1e-9. To try something yourself,
`run_threads(function, 2)` of `shared.parallel.comm.threads` calls function(group) on two ranks and returns what they return.

A model is any nn.Module: model(ids) -> logits [B, S, V], with ids [B, S] of int64. Its floating-point weights, model.named_parameters(),
have one dtype and at least one dimension; some may be frozen (requires_grad is False), one may be used in several places, and one may not
be used at all. Buffers (model.named_buffers()) have any dtype. A module is in training or in evaluation mode when you get it: leave it so.

A micro-batch is a pair (ids, targets), both [B, S]; B and S may differ from one to the next. `loss`(logits, targets) gives the sum of the
losses of the targets that count, as a scalar with a graph, 0 if none does; a target of -100 does not count. Each rank has micro-batches
of its own. The loss of a step is the sum over all micro-batches of all ranks, divided once by the number of all their targets that count,
and the gradients are the gradients of this loss.

`optimizer` is a function: optimizer(tensors) -> a torch.optim.Optimizer over this list of leaf tensors, such as AdamW. It treats each
element by itself, so it may be given parts of weights, of any shape, also empty ones, and an empty list. Its state for a tensor has tensors
of that tensor's shape, and scalars (such as "step"). Call it once, in the functions that get it.

`group` is the communicator of the ranks (shared/parallel/comm/communicator.py): group.rank, group.size (1 or more), and collectives in
place on contiguous tensors, of which autograd sees nothing: group.all_reduce(tensor), group.broadcast(tensor, root),
group.all_gather(whole, part), group.reduce_scatter(part, whole), each with asynchronous=True if you wish, which returns a work to wait for.
group.trace.entries lists what this rank has started. The group need not be the world, so it cannot be split.

The stages
    1 start      every rank begins with rank 0's weights and buffers
    2 gradients  the gradients of one micro-batch on each rank are one process's: uneven tokens, a rank without any, unused weights
    3 buckets    gradients travel in buckets while the backward pass still computes: as soon as a bucket is full, and always in one order
    4 accumulate several micro-batches on each rank, unequally many, or none: one exchange for all of them
    5 zero       ZeRO-1: each rank steps its equal share of the weights, and has the optimizer's state for this share alone
    6 gather     FSDP, forward: a unit's weights are cut over the ranks, gathered for its forward pass, and freed after it
    7 reduce     FSDP, backward: they are gathered again, and the unit's gradients are reduce-scattered
    8 recompute  a unit keeps its input alone, and runs again in the backward pass
    9 clip       one norm over all gradients of all ranks, each number counted once, and one clipping
    10 state     weights and optimizer state as whole tensors, and loaded by another number of ranks, and another of the three kinds
    11 budgets   what a step may send and hold (see `backward`)
    12 bad_input what cannot be right is refused on every rank, with a ValueError that says what
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator

Batch = tuple[Tensor, Tensor]  # ids and targets, [B, S] each
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def make_replica(model: nn.Module, group: Communicator, optimizer: Optimizer, bucket_bytes: int) -> object:
    """DDP of a model, whatever you make it: every rank has all weights and steps all of them. All weights and buffers of `model`, which may
    differ between the ranks, are rank 0's afterwards.

    Buckets are made of the trained weights in the reverse order of model.named_parameters(): each bucket takes the next ones while they
    have at most bucket_bytes together, and at least one.

    Raises (stage 12):
        ValueError: bucket_bytes is below 1 (the value). Or the ranks' models differ in names, order, shapes or what is frozen: the message
            has the name of the first weight that differs, on every rank.
    """
    raise NotImplementedError("06.build: make_replica is not written yet")


def make_zero(model: nn.Module, group: Communicator, optimizer: Optimizer, bucket_bytes: int) -> object:
    """ZeRO-1 of a model: as `make_replica`, but the optimizer is given this rank's share of the trained weights. Shares have equal sizes:
    at most 1 / ranks of the numbers, and ranks numbers more for each bucket. The weights in `model` are whole and equal on every rank
    after `update`."""
    raise NotImplementedError("06.build: make_zero is not written yet")


def make_sharded(model: nn.Module, units: Sequence[str], group: Communicator, optimizer: Optimizer, recompute: bool = False) -> object:
    """FSDP of a model, which also starts with rank 0's weights and buffers.

    units: names of modules in `model` (model.get_submodule), in the order in which a forward pass calls them. Each is called once, with one
    tensor, returns one tensor, and what follows in the model depends on it; none is inside another, and a weight of a unit is used nowhere
    else. It need not be used on every rank, or at all. Of each unit's weights, trained or frozen, every rank keeps an equal share: at
    most 1 / ranks of the numbers, and ranks numbers more. The optimizer is given this rank's share of the trained ones. Weights outside
    of units stay whole on every rank, as in `make_replica`, and are stepped on each. You may change the model; its original weights can be
    freed once you have them.

    recompute: between forward and backward pass a unit keeps nothing but its input and what its weights need, and its forward pass runs
    again in the backward pass, with the same random numbers (PyTorch's global generator, which is afterwards as if it had run once).

    Raises (stage 12):
        ValueError: see `make_replica`. Or a unit is no module of the model (its name).
    """
    raise NotImplementedError("06.build: make_sharded is not written yet")


def forward(parallel: object, ids: Tensor) -> Tensor:
    """The logits of this rank's ids, with a graph where gradients are enabled. All ranks call it. It need not be followed by a backward
    pass."""
    raise NotImplementedError("06.build: forward is not written yet")


def backward(parallel: object, microbatches: Sequence[Batch], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Forward and backward passes of a step, without the update. With `make_sharded` the ranks have equally many micro-batches, at least
    one; otherwise they may have any number, also 0. Gradients of an earlier step are gone.

    A bucket is one all-reduce, asynchronous. In the backward pass of the rank's last micro-batch it starts as soon as the gradients of all
    its weights are complete and the buckets before it have started; what has not started then, starts after it. All are waited for
    after the backward pass. With `make_zero` a bucket may be a reduce-scatter, and has to be one from stage 11 on.

    Budgets (stage 11), where P is the bytes of the trained weights and F the bytes of the units' weights. Beside these a step may make 8
    calls, with 256 bytes and 8 bytes for each weight in all. Padding to equal shares is not counted.
        replica   backward: all-reduces of P, one for each bucket, however many micro-batches
        zero      backward: reduce-scatters of P, one for each bucket; update: all-gathers of P, at most one for each bucket
        sharded   each micro-batch: every unit is one all-gather in the forward pass, one in the backward pass, and one reduce-scatter;
                  each of these three sums to F (the reduce-scatters may leave out frozen weights). Once in a step: all-reduces of the
                  trained weights outside, at most one for each
        memory    with `make_sharded`, in the forward pass the whole weights of one unit at a time; in the backward pass weights,
                  gradients and buffers of at most three units' size. After the step: shares, their gradients and optimizer state alone

    Returns:
        The loss of the step, without a graph, the same on every rank.

    Raises (stage 12):
        ValueError: on every rank, before any weight or gradient has changed. No target counts on any rank; a rank's ids and targets differ
            in shape (the message has the rank, on all ranks); with `make_sharded`, unequally many micro-batches (both numbers).
    """
    raise NotImplementedError("06.build: backward is not written yet")


def gradients(parallel: object) -> dict[str, Tensor | None]:
    """The gradients of the last `backward`, whole, of all trained weights under their names, on every rank. All ranks call it. None
    for a weight that no rank used; one that any rank used has a gradient on all of them."""
    raise NotImplementedError("06.build: gradients is not written yet")


def update(parallel: object, max_norm: float | None = None) -> Tensor:
    """One step of the optimizer on the gradients of the last `backward`. A weight that no rank used is not stepped, and does not decay.

    Returns:
        The norm of all gradients, before clipping, the same on every rank. Where it is above max_norm, the gradients are multiplied by
        max_norm / norm before the step (stage 9; without max_norm before).

    Raises (stage 12):
        ValueError: the norm is not finite (the value), on every rank. Weights and optimizer state are as they were.
    """
    raise NotImplementedError("06.build: update is not written yet")


def state(parallel: object) -> dict[str, dict[str, Any]]:
    """What a checkpoint holds, on every rank; all ranks call it. Whole tensors of their own, which no later step changes.

    Returns:
        "model": all weights, trained and frozen, under their names. "optimizer": for each weight that has been stepped, under its name, the
        optimizer's state for it: tensors in the weight's shape, and scalars (tensors without dimensions, or numbers).
    """
    raise NotImplementedError("06.build: state is not written yet")


def load(parallel: object, state: dict[str, dict[str, Any]]) -> None:
    """Continue from the `state` of any of the three kinds on any number of ranks. All ranks call it, with the same state; it stays as
    it is.

    Raises (stage 12):
        ValueError: a weight is missing, unknown, or of another shape: its name. Nothing has changed then.
    """
    raise NotImplementedError("06.build: load is not written yet")
