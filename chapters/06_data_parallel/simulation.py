"""A training step simulated: a dry run records what one rank of many computes and communicates, and a replay times it over a chosen link.

    world = dry_run(4)
    ...                                              one step of any parallelism, on a mesh made of `world`
    replay([world.take_actions()] * 4, Link(latency=2e-5, bandwidth=1e10))

Where every core computes there is nothing to hide communication behind, and wall times show no overlap. So the real code runs once, in one
process, with a fake process group, whose operations take no time and carry nothing: the loss means nothing, but shapes and the order of
operations are right. The replay then gives each rank one compute stream, and the link carries one operation at a time:

    an operation starts   once every rank has begun it and the one before it is over
    it takes              latency * messages + bytes / bandwidth        (`shared.parallel.planning.costs`)
    a wait ends           once its operation is over; until then the rank computes nothing: this communication is exposed

Left out on purpose: sends between two ranks, several links, and the cycles that communication takes from computing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from shared.course import figures
from shared.parallel.comm.communicator import Communicator, CompletedWork, Reduction, Work
from shared.parallel.comm.trace import CommTrace
from shared.parallel.planning.costs import Link, cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["compute", "communication", "idle"]
COLORS = {"compute": figures.COMPUTE, "communication": figures.COMMUNICATION, "idle": figures.IDLE}
STREAMS = {"compute": "compute", "idle": "compute", "communication": "link"}  # the row of a bar of each kind


@dataclass(frozen=True)
class Compute:
    """seconds of computing. name: of what, such as "forward"."""

    seconds: float
    name: str = ""


@dataclass(frozen=True)
class Begin:
    """Begin an operation of all `ranks`. bytes: of the whole tensor, as the trace counts."""

    operation: str
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Wait:
    """Wait for an operation: the `number`-th that this rank has begun, from 0."""

    number: int


Action = Compute | Begin | Wait


@dataclass(frozen=True)
class Bar:
    """What a rank was busy with, from `begin` to `end` in seconds; `idle` where it waited for communication."""

    rank: int
    kind: Kind
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Bars of all ranks, in simulated time."""

    bars: list[Bar]

    @property
    def seconds(self) -> float:
        return max((bar.end for bar in self.bars), default=0.0)

    def total(self, kind: Kind, rank: int = 0) -> float:
        """Seconds of one kind on a rank. `idle` is its exposed communication."""
        return sum(bar.end - bar.begin for bar in self.bars if bar.rank == rank and bar.kind == kind)


@dataclass
class Player:
    """A rank's position in its program, and its clock."""

    program: Sequence[Action]
    position: int = 0
    now: float = 0.0
    begun: list[tuple[Begin, float]] = field(default_factory=list)


def replay(programs: Sequence[Sequence[Action]], link: Link) -> Timeline:
    """Simulate the step: when everything happens if these ranks are joined by this link.

    Args:
        programs: of each rank. All begin the same operations in the same order; how long they compute in between may differ.

    Raises:
        ValueError: the ranks begin different operations, or one waits for what another never begins.
    """
    players, bars, ends = [Player(program) for program in programs], [], []
    while any(player.position < len(player.program) for player in players):
        before = [player.position for player in players], len(ends)
        for rank, player in enumerate(players):
            bars += advance(rank, player, ends)
        while all(len(player.begun) > len(ends) for player in players):
            bars += carry_out([player.begun[len(ends)] for player in players], ends, link)
        if before == ([player.position for player in players], len(ends)):
            stuck = next(rank for rank, player in enumerate(players) if player.position < len(player.program))
            raise ValueError(f"Rank {stuck} waits for an operation that not every rank begins: every rank must begin all of them.")
    return Timeline(bars)


def advance(rank: int, player: Player, ends: Sequence[float]) -> list[Bar]:
    """Run a rank until it waits for an operation whose end is not known yet. `ends`: when each operation so far is over."""
    bars = []
    for action in player.program[player.position :]:
        match action:
            case Compute():
                bars.append(Bar(rank, "compute", action.name, player.now, player.now + action.seconds))
                player.now += action.seconds
            case Begin():
                player.begun.append((action, player.now))
            case Wait():
                if action.number >= len(ends):
                    break
                if ends[action.number] > player.now:
                    bars.append(Bar(rank, "idle", player.begun[action.number][0].operation, player.now, ends[action.number]))
                player.now = max(player.now, ends[action.number])
        player.position += 1
    return bars


def carry_out(begun: Sequence[tuple[Begin, float]], ends: list[float], link: Link) -> list[Bar]:
    """The next operation, which every rank has begun; its end is added to `ends`."""
    first = begun[0][0]
    if any((other.operation, other.bytes) != (first.operation, first.bytes) for other, _ in begun):
        raise ValueError(f"The ranks begin different operations as their number {len(ends)}: {sorted({b.operation for b, _ in begun})}.")
    start = max(ends[-1] if ends else 0.0, *(moment for _, moment in begun))
    ends.append(start + cost(first.operation, first.bytes, first.ranks).seconds(link))
    return [Bar(rank, "communication", first.operation, start, ends[-1]) for rank in range(len(begun))]


def draw(timelines: Mapping[str, Timeline], ranks: Sequence[int] = (0,)) -> "Figure":
    """Timelines below each other on one scale, each under its name: a row for each stream of each rank of `ranks`."""
    import matplotlib.pyplot as plt

    longest = max(timeline.seconds for timeline in timelines.values())
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)
    height = 0.8 + len(timelines) * (0.5 + 0.35 * len(ranks))
    figure, places = plt.subplots(len(timelines), sharex=True, squeeze=False, figsize=(figures.STYLE["figure.figsize"][0], height))
    for (name, timeline), axes in zip(timelines.items(), places[:, 0], strict=True):
        draw_bars(axes, [bar for bar in timeline.bars if bar.rank in ranks], scale)
        axes.set_title(f"{name} (simulated)", loc="left", fontsize="medium")
        axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest * scale)
    axes.set_xlabel(f"time, {unit}")
    handles = {label: handle for axes in places[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=len(handles))
    return figure


def draw_bars(axes: "Axes", bars: Sequence[Bar], scale: float) -> None:
    rows = sorted({row_of(bar) for bar in bars})
    for kind, color in COLORS.items():
        if of_kind := [bar for bar in bars if bar.kind == kind]:
            starts, lengths = [bar.begin * scale for bar in of_kind], [(bar.end - bar.begin) * scale for bar in of_kind]
            at = [rows.index(row_of(bar)) for bar in of_kind]
            axes.barh(at, lengths, left=starts, height=0.8, color=color, edgecolor="white", linewidth=0.4, label=kind)
    axes.set_yticks(range(len(rows)), [f"rank {rank}: {stream}" for rank, stream in rows])
    axes.invert_yaxis()


def row_of(bar: Bar) -> tuple[int, str]:
    return bar.rank, STREAMS[bar.kind]


# The dry run: one process plays rank 0 of many, and its actions are recorded.


class Recorder:
    """The actions recorded so far. clock: in seconds; it is stopped while an operation is recorded."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.actions, self.begun = clock, list[Action](), 0
        self.since = clock()

    def record_compute(self, name: str) -> None:
        """Compute since the last action."""
        seconds = self.clock() - self.since
        if seconds > 0:
            self.actions.append(Compute(seconds, name))
        self.since = self.clock()

    def record(self, action: Action) -> None:
        self.actions.append(action)
        self.since = self.clock()


class FakeGroup(Communicator):
    """A fake process group: rank 0 of a group whose other ranks do not exist. `dry_run` makes the world."""

    def __init__(self, members: Sequence[int], axis: str, trace: CommTrace, recorder: Recorder, split_number: int = 0):
        super().__init__(members, members.index(0), axis, trace, split_number)
        self.recorder = recorder

    def take_actions(self) -> list[Action]:
        """What this rank did since the world was made, or since the last call."""
        self.recorder.record_compute(self.trace.phase)
        actions, self.recorder.actions, self.recorder.begun = self.recorder.actions, [], 0
        return actions

    def dispatch(
        self, operation: str, payload: Tensor | int, start: Callable[[], Work], asynchronous: bool, peer: int | None = None,
        is_traffic: bool = True,
    ) -> Work:  # fmt: skip
        if peer is not None:
            raise ValueError(f"{operation}: a dry run has no other rank to send to or to receive from. Run it in threads.")
        if not is_traffic:
            return super().dispatch(operation, payload, start, asynchronous, is_traffic=False)
        self.recorder.record_compute(self.trace.phase)
        work = RecordedWork(super().dispatch(operation, payload, start, asynchronous=True), self.recorder, self.trace)
        self.recorder.record(Begin(operation, self.trace.entries[-1].bytes, self.size))
        if not asynchronous:
            work.wait()
        return work

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return CompletedWork()

    def _all_gather(self, whole: Tensor, part: Tensor) -> Work:
        whole.view(self.size, -1).copy_(part.flatten().expand(self.size, -1).clone())
        return CompletedWork()

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        part.view(-1).copy_(whole.view(self.size, -1)[self.rank])
        return CompletedWork()

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return CompletedWork()

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Work:
        """Every other rank sends what this one sends to itself, where that has the size that is expected."""
        own = sent[self.rank]
        for tensor in received:
            tensor.copy_(own) if own.shape == tensor.shape else tensor.zero_()
        return CompletedWork()

    def _send(self, tensor: Tensor, to: int) -> Work:
        return CompletedWork()

    def _receive(self, tensor: Tensor, source: int) -> Work:
        return CompletedWork()

    def _barrier(self) -> Work:
        return CompletedWork()

    def _gather_texts(self, text: str) -> list[str]:
        return [text] * self.size

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        return FakeGroup(mine, axis, self.trace, self.recorder, self.splits)


class RecordedWork:
    """A handle that records when it is waited for."""

    def __init__(self, work: Work, recorder: Recorder, trace: CommTrace):
        self.work, self.recorder, self.trace = work, recorder, trace
        self.number: int | None = recorder.begun
        recorder.begun += 1

    def wait(self) -> None:
        if self.number is not None:
            self.recorder.record_compute(self.trace.phase)
            self.work.wait()
            self.recorder.record(Wait(self.number))
            self.number = None


def dry_run(ranks: int, clock: Callable[[], float] = time.perf_counter) -> FakeGroup:
    """Start a dry run: the world of rank 0 of `ranks`, without the others.

    Args:
        clock: returns seconds, and need not be a clock: with

                with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                    world = dry_run(4, clock=lambda: counter.get_total_flops() / 71e12)

            computing takes as long as its matrix products do at 71 TFLOP/s, the same on every machine.
    """
    return FakeGroup(range(ranks), "world", CommTrace(), Recorder(clock))
