"""The build of chapter 08: a runner for any valid schedule, yours from an empty file. About four hours.

    course check 08.build                all stages; course check 08.build.forward: one
    course hint 08.build.forward         three hints for each stage
    course reset 08.build                this file as it was; your text is kept

You design the pipeline: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay
thin: a line or two each that call what you wrote. A stage whose functions still raise NotImplementedError is NOT ATTEMPTED, so you can work
from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 07, and what you wrote in exercises.py (copy it here). Schedules are data: `Action` and the lists
of `shared.parallel.pipeline.schedules` are given. What runs or validates them is what you build, so the other modules of
`shared.parallel.pipeline` and `torch.distributed.pipelining` may not be imported. The checks run in float64, with ranks as threads, and
compare with one process to 1e-9. To try something yourself, `run_threads(function, 2)` of `shared.parallel.comm.threads` calls
function(group) on two ranks and returns what they return.

The model is a plain module, whole and the same on every rank when you get it
    model.embedding   ids [B, S] -> [B, S, D], an nn.Embedding; D is model.embedding.embedding_dim
    model.blocks      an nn.ModuleList; each block is a module, [B, S, D] -> [B, S, D], its matrices, if any, nn.Linear with bias
    model.norm        [B, S, D] -> [B, S, D]
    model.head        [B, S, D] -> logits [B, S, V], an nn.Linear without bias
Weights have the model's names (model.named_parameters()): embedding.weight, blocks.0.up.weight, ..., head.weight. A module is in training
or in evaluation mode when you get it: leave it so.

A micro-batch is a pair (ids, targets), both [B, S], and every rank gets all of them. B and S may differ from one micro-batch to the next.
`loss`(logits, targets) gives the sum of the losses of the targets that count, as a scalar; a target of -100 does not. A step's loss is
the sum over all its micro-batches divided once by the number of all targets that count, and its gradients are the gradients of this loss.

`cut` gives the blocks of each stage as a range, from the first stage to the last. The first stage has the embedding as well, the last one
norm and head. Stage s is chunk s // ranks of rank s % ranks: with as many stages as ranks, each rank has chunk 0 alone.

A schedule gives each rank's actions in order: schedule[rank] is a list of Action(kind, microbatch, chunk). Kinds:
    F    forward: take activations from the previous stage, hand the result to the next stage
    B    backward: take the result's gradient from the next stage, hand the gradient of what F took to the previous stage
    I    as B, without the gradients of the blocks' matrices (the weights of nn.Linear in the blocks);    W    these
Every micro-batch goes through every chunk of a rank once forward and once backward, and backward is either B, or I and later W. No schedule
says when a message is sent or received: F, B and I send what they have made as soon as they have it, and nobody waits until it is received.

`group` is the communicator of the pipeline's ranks (shared/parallel/comm/communicator.py): group.rank, group.size (2 or more),
group.send(tensor, to, asynchronous=True), which returns a work to wait for later, group.receive(tensor, source) into a tensor of the right
shape and dtype, and group.all_reduce(tensor). Ranks count within the group, tensors are contiguous, and autograd sees none of this. The
group need not be the world, so it cannot be split. A message has no name: what one rank sends to another arrives in the order of sending.

The stages (up to stage 6, schedules have F and B only; up to stage 4, ranks have one chunk)
    1 cut        each rank holds the weights of its stages and nothing else, under the model's names; the rest can be freed
    2 forward    activations travel: the losses are one process's
    3 backward   gradients travel back: every gradient of a GPipe step is one process's
    4 schedule   any list: GPipe, 1F1B, lists made by chance, with micro-batches of uneven sizes and tokens
    5 chunks     several chunks on each rank, interleaved or in any order: between two ranks, several kinds of messages come in one
                 queue, in the sender's order, which need not be the order in which you need them (the core refuses such lists)
    6 refuse     a list that cannot run is refused on every rank before anything is sent: a ValueError that names a rank and an action at
                 fault, as in "rank 1" and "B0" (str(action)). An action that is missing, there twice, of a kind, micro-batch or chunk that
                 there is not, or before what it needs on its own rank; a number of lists that is not the ranks'; and ranks that would wait
                 for each other. All else can run
    7 split      I and W: the matrices' gradients are computed in W and nowhere else, and what W needs is freed after it
    8 ends       model.head.weight may be model.embedding.weight: the first and the last rank both hold it, as embedding.weight, and both
                 end with the sum of the two gradients. Loss and gradient norm are the same on every rank
    9 budgets    one message of [B, S, D] for each F, B or I that has a neighbour there. Besides these a rank has at most 4 calls and 64
                 bytes, and at the ends a shared weight's gradient, sent and received. Each matrix is multiplied three times for a
                 micro-batch: once forward, twice backward. Under 1F1B a rank keeps activations of at most ranks - rank micro-batches, and
                 after a step nothing is left but gradients
    10 bad_input what cannot be right is refused on every rank, before anything is sent: a ValueError with the numbers
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator
from shared.parallel.pipeline.schedules import Action

Batch = tuple[Tensor, Tensor]  # ids and targets, [B, S] each


def make_pipeline(model: nn.Module, cut: Sequence[range], group: Communicator, loss: Callable[[Tensor, Tensor], Tensor]) -> object:
    """This rank's part of the pipeline, whatever you make it. You may keep the model's own modules; all but this rank's can be freed after.

    Raises:
        ValueError: the ranges of `cut` do not name all blocks once and in order (the first block that is not where it should be), or the
            stages are not a multiple of the ranks (both numbers).
    """
    raise NotImplementedError("08.build: make_pipeline is not written yet")


def state(pipeline: object) -> dict[str, Tensor]:
    """This rank's weights, under the model's names."""
    raise NotImplementedError("08.build: state is not written yet")


def losses(pipeline: object, microbatches: Sequence[Batch]) -> list[Tensor]:
    """The forward passes alone, without gradients: each micro-batch's sum of losses, on the last rank; an empty list on the others.

    It is called with one chunk on each rank.
    """
    raise NotImplementedError("08.build: losses is not written yet")


def step(pipeline: object, microbatches: Sequence[Batch], schedule: Sequence[Sequence[Action]]) -> Tensor:
    """One step of a schedule, forward and backward.

    Returns:
        The step's loss, on the rank of the last stage; from stage 8 on, on every rank.

    Raises:
        ValueError: the schedule cannot run (stage 6). There are no micro-batches; ids and targets differ in shape (both shapes); an id is
            outside the vocabulary (the id, and V); no target counts (stage 10).
    """
    raise NotImplementedError("08.build: step is not written yet")


def gradients(pipeline: object) -> dict[str, Tensor]:
    """The gradients of the last step, and of no other, of this rank's weights, under their names."""
    raise NotImplementedError("08.build: gradients is not written yet")


def gradient_norm(pipeline: object) -> Tensor:
    """The norm of all gradients of the last step, over all ranks, each weight counted once: the same on every rank. All ranks call it."""
    raise NotImplementedError("08.build: gradient_norm is not written yet")
