"""Chapter 08. Pipeline schedules (GPipe, 1F1B, interleaved 1F1B, zero bubble) as data: a list of actions for each rank.

    F0 F1 F2 F3 .. .. B0 B1 B2 B3        GPipe: all forward passes, then all backward passes
    F0 F1 B0 F2 B1 F3 B2 .. B3           1F1B: a backward pass as soon as there is one, so fewer activations are kept

A model's layers are cut into stages, and a step's batch into micro-batches. Stage s is chunk s // ranks of rank s % ranks: with several
chunks, each micro-batch goes around all ranks several times. A schedule has neither times nor messages: a rank runs its actions in order,
and each blocks on its inputs. `shared.parallel.pipeline.simulate` validates and times any list, and `runner` executes it.

Left out on purpose: schedules that keep more activations so as to have no bubble at all (ZB-H2, ZB-V), and a search for the best one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.course.binding import exercise
from shared.course.errors import SettingError

Kind = Literal["F", "B", "I", "W"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class Action(NamedTuple):
    """One action of a rank in a step.

    kind: F, the forward pass; B, the backward pass; or its two parts: I, the gradients of activations, on which the previous stage blocks,
        and W, the gradients of weights, on which nothing blocks.
    microbatch, chunk: counted from 0. The chunk is one of this rank's own.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Schedule = Sequence[Sequence[Action]]  # by rank


@exercise("08.gpipe")
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


@exercise("08.one_forward_one_backward")
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


@exercise("08.interleaved")
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


def zero_bubble(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The zero-bubble schedule ZB-H1: 1F1B whose weight gradients fill the bubble (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
    section 2).

    Input gradients take the place of 1F1B's backward passes. Weight gradients follow as many micro-batches behind as the rank's number:
    no rank then keeps more activations than 1F1B's first does.

    Args:
        rank: which of the `ranks` stages.
        microbatches: at least 1.

    Returns:
        The rank's actions, in order: F, I and W once for each micro-batch, chunk 0; each kind in the micro-batches' order.

    >>> [str(action) for action in zero_bubble(rank=1, ranks=2, microbatches=3)]
    ['F0', 'I0', 'F1', 'I1', 'W0', 'F2', 'I2', 'W1', 'W2']
    """
    actions, waiting = [], []
    for action in one_forward_one_backward(rank, ranks, microbatches):
        if action.kind == "F":
            actions.append(action)
            continue
        actions.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > rank:
            actions.append(waiting.pop(0))
    return actions + waiting


def bubble_fraction(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The bubble of GPipe, 1F1B and interleaved 1F1B, as a fraction of the time that a rank computes (Narayanan et al. 2021, section 2.2).

    For stages that all take equally long, and messages that take no time: a rank waits for the others while `ranks - 1` micro-batches go
    forward and backward through one of its chunks, and computes while all micro-batches go through all its chunks.

    Returns:
        (ranks - 1) / (chunks * microbatches). Of the whole time, the bubble's fraction x is x / (1 + x).

    >>> bubble_fraction(ranks=4, microbatches=8), bubble_fraction(ranks=4, microbatches=8, chunks=2)
    (0.375, 0.1875)
    """
    return (ranks - 1) / (chunks * microbatches)


BY_NAME: dict[str, Callable[..., list[Action]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero_bubble": zero_bubble}


def make_schedule(name: ScheduleName, ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """A schedule by its name, for all ranks.

    Raises:
        SettingError: it does not take several chunks, or this number of micro-batches.
    """
    if name == "interleaved":
        return [interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    if chunks != 1:
        raise SettingError(f"The schedule {name} gives each rank one chunk of the model, not {chunks}: use interleaved, or 1 chunk.")
    return [BY_NAME[name](rank, ranks, microbatches) for rank in range(ranks)]


class Message(NamedTuple):
    """A message from an action on one rank to one on another. what, source, to: its way. microbatch, stage: where it was computed."""

    what: str
    source: int
    to: int
    microbatch: int
    stage: int

    @property
    def way(self) -> tuple[str, int, int]:
        return self.what, self.source, self.to

    def __str__(self) -> str:
        return f"{self.what} of micro-batch {self.microbatch} from stage {self.stage}"


@dataclass(frozen=True)
class Shape:
    """The shape of a pipeline: stage s is chunk s // ranks of rank s % ranks."""

    ranks: int
    chunks: int = 1

    @property
    def last(self) -> int:
        return self.ranks * self.chunks - 1

    def goes_around(self, message: Message) -> bool:
        """Whether a message goes between the last rank and the first one, from one chunk to another."""
        ends = (message.source, message.to) if message.what == "activations" else (message.to, message.source)
        return ends == (self.ranks - 1, 0)

    def needed(self, rank: int, action: Action) -> Message | None:
        """The message that an action receives: activations of the previous stage, or gradients of the next one."""
        stage = action.chunk * self.ranks + rank
        if action.kind == "F" and stage > 0:
            return Message("activations", (rank - 1) % self.ranks, rank, action.microbatch, stage - 1)
        if action.kind in "BI" and stage < self.last:
            return Message("gradients", (rank + 1) % self.ranks, rank, action.microbatch, stage + 1)
        return None

    def given(self, rank: int, action: Action) -> Message | None:
        """The message that an action sends."""
        stage = action.chunk * self.ranks + rank
        if action.kind == "F" and stage < self.last:
            return Message("activations", rank, (rank + 1) % self.ranks, action.microbatch, stage)
        if action.kind in "BI" and stage > 0:
            return Message("gradients", rank, (rank - 1) % self.ranks, action.microbatch, stage)
        return None
