"""Your part of chapter 06. Write each body in place of its `raise` line, in any order.

    course check 06          checks what you wrote
    course hint 06.ring_all_reduce    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.parallel.data.ddp import Bucket
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.model.sharding import Range
from shared.parallel.data.activation_checkpointing import random_numbers_from


# Ring all-reduce (30 min, difficulty 3 of 5)
def ring_all_reduce(tensor: Tensor, group: Communicator) -> None:
    """Every rank's `tensor` becomes the sum over the ranks, in place, by sends to one neighbour and receives from the other.

    Ranks form a ring: each sends to the next rank and receives from the one before, and the last one's next is rank 0. The tensor is cut
    into n chunks for n ranks, as equal as can be.

        reduce-scatter, n - 1 steps: send a chunk to the next rank; add the chunk that arrives to one's own numbers
        all-gather, n - 1 steps:     send a chunk that is the whole sum to the next rank; the one that arrives replaces one's own

    In each step all ranks send at once, each another chunk, and what a rank sends is what it completed in the step before. A send is over
    once the other side receives: if all ranks waited for that first, none would ever get to its receive.

    Args:
        tensor: contiguous, of any shape, dtype and length: also shorter than n, so that some chunks are empty. Ranks hold the same bits
            afterwards.
        group: the ranks that add up. `group.rank` of `group.size`; `send(tensor, to)` and `receive(tensor, source)`, which writes what
            arrives into `tensor`, count ranks within the group, are done when they return, and with `asynchronous=True` once one calls
            `wait()` on what they return.

    It sends 2 (n - 1) times, each time one chunk (an empty one too) and straight from the tensor, and beside the tensor needs memory for
    one chunk. A group of one rank sends nothing.

    >>> def add_up(world):                                         # ranks hold 1, 10 and 100 times [0, 1, 2, 3]
    ...     tensor = 10.0**world.rank * torch.arange(4.0)
    ...     ring_all_reduce(tensor, world)
    ...     return tensor
    >>> run_threads(add_up, 3)[0]
    tensor([  0., 111., 222., 333.])
    """
    raise NotImplementedError("06.ring_all_reduce: write this body")


# Gradients in buckets, while backward is at work (30 min, difficulty 4 of 5)
def sync_buckets(buckets: Sequence[Bucket]) -> Callable[[], None]:
    """Overlap the gradient all-reduce with the next backward pass: start each bucket as soon as possible.

    It is called before the forward pass of a step's last micro-batch. A bucket is full once each of its parameters has its gradient of that
    pass, added to those of earlier micro-batches. At that moment autograd calls what was registered with
    `parameter.register_post_accumulate_grad_hook(function)`, as function(parameter). `parameter.grad` may hold earlier micro-batches'
    gradients already, so that it is set does not say that this pass has come by.

    Ranks may have their gradients in different orders, yet must start the same operations in the same order. So bucket 0 starts
    first, then bucket 1, and so on: a bucket that is full waits until those before it have started, and then starts at once.

    A parameter that the pass did not use calls no hook. What is not full when the pass is over starts in `finish`, in order.

    Args:
        buckets: the same ones in the same order on every rank; no parameter is in two. `bucket.parameters` are its parameters;
            `bucket.start()` takes their gradients as they are at that moment and starts to add them over the ranks, without waiting.
            It returns the work of that operation, whose `wait()` completes the sums.

    Returns:
        finish: to be called once, without arguments, after the backward pass. Then every bucket has started once and was waited for,
        and no hook is left, so that later passes exchange nothing.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> (5 * weight).sum().backward()                              # an earlier micro-batch
    >>> finish = sync_buckets([SummedBucket([weight], SingleRankCommunicator())])
    >>> (2 * weight).sum().backward()                              # the last one: the bucket starts in here, with 5 + 2
    >>> finish()
    >>> weight.grad
    tensor([7.])
    """
    raise NotImplementedError("06.sync_buckets: write this body")


# Who holds what under ZeRO (30 min, difficulty 3 of 5)
def partition(sizes: Sequence[int], whole: Sequence[bool], held: Sequence[int]) -> list[list[Range]]:
    """Partition parameters over ranks for ZeRO, so that ranks hold as nearly equal numbers of elements as possible.

    First the parameters that must stay whole, the largest first: each goes to the rank that then holds the fewest numbers. The others may
    be cut anywhere, and each of their numbers goes to a rank that holds few: afterwards a rank that received any of them holds at most one
    number more than any other rank. So 6 numbers for ranks that hold 9, 2 and 1 make 9, 5 and 4, and a rank may receive nothing.
    A model has hundreds of millions of numbers: do not go through them one by one.

    Args:
        sizes: how many numbers each parameter has, at least 1.
        whole: whether a parameter must stay on one rank.
        held: how many numbers each rank holds already, one for each rank.

    Returns:
        ranges: ranges[p][r] = (start, stop) is what rank r gets of parameter p's flattened numbers; start == stop where it gets nothing.
        Over the ranks, each number of p once.

    >>> partition([10], whole=[False], held=[0, 0, 0])
    [[(0, 4), (4, 7), (7, 10)]]
    >>> partition([2, 6, 8], whole=[True, True, False], held=[0, 0])       # rank 0 holds 6, rank 1 holds 2, and 8 level them out
    [[(0, 0), (0, 2)], [(0, 6), (0, 0)], [(0, 2), (2, 8)]]
    """
    raise NotImplementedError("06.partition: write this body")


# Activation checkpointing (20 min, difficulty 3 of 5)
def recompute(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    upstream: Tensor,
    random_state: list[Tensor],
) -> tuple[Tensor | None, ...]:
    """The backward pass of activation checkpointing: run the function again from its saved inputs, now with a graph, and differentiate.

    Args:
        run: run(*inputs) -> output. It uses `parameters`, and it may draw random numbers, as dropout does.
        inputs: the inputs of the first run. Tensors of any dtype; integer tensors have no gradient. An input may have been computed from
            another one, and one tensor may be given twice. Each place gets the gradient of what `run` does with it there: what flows from
            one input to another outside of `run` is not part of it. For x and y = 2 x, and run = x * y, x gets y and y gets x.
        parameters: the other tensors that it reads. They may be frozen, and it may leave some of them unused.
        upstream: the gradient of the loss with respect to the output, in the output's shape.
        random_state: the generators as they were before the first run. `with random_numbers_from(random_state):` restores them, and resets
            them afterwards, so that the second run does not change the random numbers that are drawn next.

    Returns:
        The gradient of each input, then of each parameter, in their order and shapes. None for a tensor that does not require one, and
        for one that the output does not depend on, also where that is all of them. No `.grad` is changed: autograd accumulates the
        returned gradients, so hooks on a parameter see one gradient. Gradients are recorded here even where they are switched off
        outside, as in a backward pass.

    >>> x, weight = torch.tensor([2.0]), torch.tensor([5.0], requires_grad=True)
    >>> recompute(lambda x: (x * weight).square(), [x], [weight], torch.tensor([0.5]), random_state_of(x))    # 0.5 * 2 * (2 * 5) * 2
    (None, tensor([20.]))
    """
    raise NotImplementedError("06.recompute: write this body")


# FSDP: gather a unit (15 min, difficulty 2 of 5)
def unshard_unit(whole: Tensor, shard: Tensor, group: Communicator) -> Work:
    """Start the all-gather of an FSDP unit's weights from the ranks' shards.

    The weights that the modules compute with are views of `whole`, made once, and autograd keeps such views for the backward pass. So the
    weights must be gathered into this very tensor. Its storage, the memory behind it and its views, has 0 bytes until now, and
    `whole.untyped_storage().resize_(bytes)` gives it others.

    Args:
        whole: [size * n], of the dtype that is computed in. Its storage is allocated again, and filled.
        shard: [n], what this rank keeps, possibly of a wider dtype: it is rounded before it is sent. Left unchanged.
        group: the ranks that the unit is sharded over. `group.all_gather(whole, part, asynchronous=True)` starts to fill `whole` with the
            ranks' parts, all of one dtype; `part` may be this rank's own place in `whole`.

    Returns:
        The work of the all-gather: `whole` is complete once its `wait()` has returned. The caller computes meanwhile, so do not wait here.

    >>> whole, shard = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    >>> first_two = whole[:2]
    >>> whole.untyped_storage().resize_(0).nbytes()                # as it is between two uses
    0
    >>> unshard_unit(whole, shard, SingleRankCommunicator()).wait()
    >>> first_two
    tensor([1., 2.])
    """
    raise NotImplementedError("06.unshard_unit: write this body")


# FSDP: reduce its gradients (20 min, difficulty 3 of 5)
def reshard_unit(
    whole: Tensor, gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype, group: Communicator
) -> tuple[Tensor, Work]:
    """Free a unit's unsharded weights after its backward pass, and start the reduce-scatter of its gradients.

    The weights are freed before memory for the sum is taken: this is the moment at which a rank holds most.

    Args:
        whole: [size * n], the weights. Afterwards its storage has 0 bytes; the tensor itself, and views of it, stay.
        gradients: this rank's gradient of each parameter, in the parameter's shape, in the order in which they lie in `whole`. None for one
            that this rank has not used: other ranks may have, and every rank must send the same number of elements.
        sizes: how many numbers each parameter has; together at most size * n, and the rest is padding.
        dtype: the dtype in which gradients are added and kept.
        group: the ranks that the unit is sharded over. `group.reduce_scatter(part, whole, asynchronous=True)` starts to fill `part` with
            this rank's part of the sum of all ranks' `whole`, both of one dtype; `whole` is undefined afterwards.

    Returns:
        This rank's shard of the sum over the ranks, [n] in `dtype`, on `whole`'s device, with memory of its own: a view of a longer
        buffer would keep all of that. And the work that fills it: it is complete once `wait()` has returned. The gradients are sums over
        tokens, so they are added and never averaged.

    >>> whole, gradients = torch.ones(4), [torch.tensor([[5.0], [6.0]]), None]
    >>> shard, work = reshard_unit(whole, gradients, [2, 1], torch.float64, SingleRankCommunicator())
    >>> work.wait()
    >>> shard, whole.untyped_storage().nbytes()
    (tensor([5., 6., 0., 0.], dtype=torch.float64), 0)
    """
    raise NotImplementedError("06.reshard_unit: write this body")
