"""Your part of chapter 08. Write each body in place of its `raise` line, in any order.

    course check 08          checks what you wrote
    course hint 08.gpipe    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from shared.course.errors import SettingError, nearest_multiples
from shared.parallel.pipeline.schedules import Action, Schedule


# GPipe's schedule (10 min, difficulty 1 of 5)
def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """GPipe's schedule: all forward passes, then all backward passes, each in the micro-batches' order (Huang et al. 2019, section 2.3).

    Each rank keeps the activations of every micro-batch.

    Args:
        rank: which of the `ranks` stages.
        microbatches: at least 1.

    Returns:
        The rank's actions, in order: F and B once for each micro-batch, chunk 0.

    >>> [str(action) for action in gpipe(rank=1, ranks=2, microbatches=3)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    """
    raise NotImplementedError("08.gpipe: write this body")


# One forward, one backward (25 min, difficulty 2 of 5)
def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The 1F1B schedule (PipeDream-flush; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1).

    A micro-batch's gradient comes back to a rank after its forward and backward passes on all later stages. The rank starts further
    micro-batches meanwhile, but only as many as keep the pipeline full. With passes of one slot each, three ranks do five micro-batches so:

        rank 0   F0  F1  F2  ... ... B0  F3  B1  F4  B2  ... B3  ... B4
        rank 1   ... F0  F1  ... B0  F2  B1  F3  B2  F4  B3  ... B4  ...
        rank 2   ... ... F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  ... ...

    - The step takes as many slots as GPipe's.
    - A rank keeps a micro-batch's activations from its F to the end of its B: of at most `ranks - rank` micro-batches at a time, however
      many a step has.
    - Within this bound, every forward pass comes as early in the rank's list as it can.

    Args:
        rank: which of the `ranks` stages.
        microbatches: at least 1; also fewer than there are ranks.

    Returns:
        The rank's actions, in order: F and B once for each micro-batch, chunk 0; each kind in the micro-batches' order.

    >>> [str(action) for action in one_forward_one_backward(rank=0, ranks=2, microbatches=3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    raise NotImplementedError("08.one_forward_one_backward: write this body")


# Interleaved 1F1B (40 min, difficulty 4 of 5)
def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """The interleaved 1F1B schedule: several chunks for each rank, for a shorter bubble (Narayanan et al. 2021, section 2.2.2).

    A micro-batch goes around all ranks once for each chunk: forward from chunk 0 to the last one, backward from the last one to chunk 0.
    With passes of one slot each, two ranks with two chunks do four micro-batches so (F2' is F2 of chunk 1):

        rank 0   F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  ... B2' ... B3' B2  B3
        rank 1   ... F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3  ...

    - Forward passes: a group of as many micro-batches as there are ranks goes through chunk 0, one after the other, then the same group
      through the next chunk; after the last chunk the next group follows. Backward passes: the same groups, from the last chunk to chunk 0.
    - At first a rank does forward passes alone. Then F and B alternate, F first, until no forward pass is left; the other backward passes
      follow.
    - The last rank begins to go backward right after the first forward pass of its last chunk. Rank r does its first F in slot r, and its
      first B one slot later than rank r + 1 does. All slots in between are forward passes, while there are any.

    Args:
        rank: of `ranks`.
        microbatches: a multiple of `ranks`.
        chunks: of each rank, at least 1. With 1 it is not 1F1B: ranks warm up longer and keep more.

    Returns:
        The rank's actions, in order: F and B once for each micro-batch of each chunk.

    Raises:
        SettingError: the micro-batches are no multiple of the ranks.

    >>> [str(action) for action in interleaved(rank=1, ranks=2, microbatches=2, chunks=2)]
    ['F0', 'F1', 'F0 of chunk 1', 'B0 of chunk 1', 'F1 of chunk 1', 'B1 of chunk 1', 'B0', 'B1']
    """
    raise NotImplementedError("08.interleaved: write this body")


# When each action begins and ends (35 min, difficulty 3 of 5)
def simulate(
    schedule: Schedule, chunks: int, seconds: Callable[[Action, int], float], transfer: float = 0.0
) -> list[list[tuple[float, float]]]:
    """Simulate a pipeline schedule: when each action begins and ends, in seconds from the beginning of the step.

    A rank does its actions one at a time, in the order of its list, and begins each as early as it can: with nothing to wait for, at 0.
    An action F needs the activations of the previous stage, B and I the gradient of the next stage, which its B or I computes; W needs
    nothing of another stage. Stage s is chunk s // ranks of rank s % ranks. What one rank computes for another arrives `transfer` seconds
    after it is computed, and neither rank's work waits for the sending.

    Args:
        schedule: the actions of each rank, as `validate` accepts them; thousands, in a long step.
        chunks: of each rank.
        seconds: seconds(action, stage) is how long an action takes on a stage. Stages need not take equally long.
        transfer: seconds from rank to rank. With a single rank nothing is sent.

    Returns:
        For each rank a list: for each of its actions the tuple (begin, end).

    >>> schedule = [[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]]
    >>> simulate(schedule, chunks=1, seconds=lambda action, stage: 2.0 if action.kind == "B" else 1.0, transfer=0.5)
    [[(0.0, 1.0), (5.0, 7.0)], [(1.5, 2.5), (2.5, 4.5)]]
    """
    raise NotImplementedError("08.simulate: write this body")


# Stages as even as they can be (35 min, difficulty 4 of 5)
def balance_stages(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[range]:
    """Balance pipeline stages: divide blocks so that the most expensive stage is as cheap as possible.

    Each stage has consecutive blocks, at least one. It costs their sum; the first stage costs `first` more, for the embedding, and the
    last one `last` more, for the head. A single stage has both.

    Of several splits whose most expensive stage costs the same, take the one whose second most expensive stage is cheapest, then the third
    most expensive, and so on. Where all of these are equal, take the one whose first stage has the most blocks, then the second stage, and
    so on. So all ranks find the same split. For example, equal blocks that cost something are divided evenly where the ends add nothing,
    and the first stages have one more.

    Args:
        blocks: the cost of each block, in their order: seconds, FLOPs or bytes, at least 0. Whole numbers make ties exact.
        stages: at least 1. There are more ways to split 100 blocks over 16 stages than anyone can try: it must take seconds all the same.
        first, last: in the same unit.

    Returns:
        For each stage the range of its blocks' numbers, which count from 0.

    Raises:
        SettingError: there are fewer blocks than stages.

    >>> balance_stages([1, 1, 1, 1, 1, 1, 1], stages=3), balance_stages([1, 1, 1, 1, 1, 1], stages=2, last=2)
    ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 4), range(4, 6)])
    """
    raise NotImplementedError("08.balance_stages: write this body")
