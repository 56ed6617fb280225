"""Chapter 06. Timelines: what ranks did, from their ledgers, or what they would do over a link of one's choice, replayed.

Where every core computes there is nothing to hide communication behind, and wall times show no overlap. So a step's own events, taken down
by `shared.parallel.planning.rehearsal`, are replayed: each rank computes on one stream, and the link carries one operation at a time on another.

    an operation starts   once every rank has begun it and the one before it is over
    it takes              latency * messages + bytes / bandwidth        (`shared.parallel.planning.costs`)
    a wait ends           once its operation is over; until then the rank computes nothing: this communication is exposed

Left out on purpose: sends between two ranks, several links, and the cycles that communication takes from computing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shared.course import figures
from shared.parallel.planning.costs import Link, cost
from shared.parallel.comm.trace import CommTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["compute", "communication", "idle"]
COLORS = {"compute": figures.COMPUTE, "communication": figures.COMMUNICATION, "idle": figures.IDLE}
STREAMS = {"compute": "compute", "idle": "compute", "communication": "link"}  # where a bar of each kind stands


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
    """Bars of all ranks. simulated: whether times are replayed rather than measured."""

    bars: list[Bar]
    simulated: bool

    @property
    def seconds(self) -> float:
        return max((bar.end for bar in self.bars), default=0.0)

    def total(self, kind: Kind, rank: int = 0) -> float:
        """Seconds of one kind on a rank. Those of `idle` are its exposed communication."""
        return sum(bar.end - bar.begin for bar in self.bars if bar.rank == rank and bar.kind == kind)


@dataclass
class Player:
    """A rank on its way through its program."""

    program: Sequence[Action]
    place: int = 0
    now: float = 0.0
    begun: list[tuple[Begin, float]] = field(default_factory=list)


def replay(programs: Sequence[Sequence[Action]], link: Link) -> Timeline:
    """When everything happens, if these ranks were joined by this link.

    Args:
        programs: of each rank. All begin the same operations in the same order; how long they compute in between is their own affair.

    Raises:
        ValueError: the ranks begin different operations, or one waits for what another never begins.
    """
    players, bars, ends = [Player(program) for program in programs], [], []
    while any(player.place < len(player.program) for player in players):
        before = [player.place for player in players], len(ends)
        for rank, player in enumerate(players):
            bars += advance(rank, player, ends)
        while all(len(player.begun) > len(ends) for player in players):
            bars += carry_out([player.begun[len(ends)] for player in players], ends, link)
        if before == ([player.place for player in players], len(ends)):
            stuck = next(rank for rank, player in enumerate(players) if player.place < len(player.program))
            raise ValueError(f"Rank {stuck} waits for an operation that not every rank begins: every rank must begin all of them.")
    return Timeline(bars, simulated=True)


def advance(rank: int, player: Player, ends: Sequence[float]) -> list[Bar]:
    """Let a rank go on until it waits for an operation whose end is not known yet. `ends`: of the operations so far."""
    bars = []
    for action in player.program[player.place :]:
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
        player.place += 1
    return bars


def carry_out(begun: Sequence[tuple[Begin, float]], ends: list[float], link: Link) -> list[Bar]:
    """The next operation, which every rank has begun; its end is added to `ends`."""
    first = begun[0][0]
    if any((other.operation, other.bytes) != (first.operation, first.bytes) for other, _ in begun):
        raise ValueError(f"The ranks begin different operations as their number {len(ends)}: {sorted({b.operation for b, _ in begun})}.")
    start = max(ends[-1] if ends else 0.0, *(moment for _, moment in begun))
    ends.append(start + cost(first.operation, first.bytes, first.ranks).seconds(link))
    return [Bar(rank, "communication", first.operation, start, ends[-1]) for rank in range(len(begun))]


def measured(ledgers: Sequence[CommTrace]) -> Timeline:
    """What ranks said to each other, from their ledgers: a bar lasts from where an operation was begun to where it had been waited for.
    The ledgers' clocks must be one: those of threads, or of processes on one machine."""
    start = min((trace.zero + entry.begin for trace in ledgers for entry in trace.entries), default=0.0)
    return Timeline(
        [
            Bar(rank, "communication", entry.operation, trace.zero + entry.begin - start, trace.zero + entry.end - start)
            for rank, trace in enumerate(ledgers)
            for entry in trace.entries
            if entry.end is not None
        ],
        simulated=False,
    )


def draw(timelines: Mapping[str, Timeline], ranks: Sequence[int] = (0,)) -> "Figure":
    """Timelines below each other on one scale, each under its name: a row for each stream of each rank of `ranks`. Measured ones are
    darker where several operations were under way."""
    import matplotlib.pyplot as plt

    longest = max(timeline.seconds for timeline in timelines.values())
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)
    height = 0.8 + len(timelines) * (0.5 + 0.35 * len(ranks))
    figure, places = plt.subplots(len(timelines), sharex=True, squeeze=False, figsize=(figures.STYLE["figure.figsize"][0], height))
    for (name, timeline), axes in zip(timelines.items(), places[:, 0], strict=True):
        draw_bars(axes, [bar for bar in timeline.bars if bar.rank in ranks], scale, alpha=1.0 if timeline.simulated else 0.6)
        axes.set_title(f"{name} (simulated)" if timeline.simulated else name, loc="left", fontsize="medium")
        axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest * scale)
    axes.set_xlabel(f"time, {unit}")
    handles = {label: handle for axes in places[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=len(handles))
    return figure


def draw_bars(axes: "Axes", bars: Sequence[Bar], scale: float, alpha: float) -> None:
    rows = sorted({row_of(bar) for bar in bars})
    for kind, color in COLORS.items():
        if of_kind := [bar for bar in bars if bar.kind == kind]:
            starts, lengths = [bar.begin * scale for bar in of_kind], [(bar.end - bar.begin) * scale for bar in of_kind]
            at = [rows.index(row_of(bar)) for bar in of_kind]
            axes.barh(at, lengths, left=starts, height=0.8, color=color, edgecolor="white", linewidth=0.4, alpha=alpha, label=kind)
    axes.set_yticks(range(len(rows)), [f"rank {rank}: {stream}" for rank, stream in rows])
    axes.invert_yaxis()


def row_of(bar: Bar) -> tuple[int, str]:
    return bar.rank, STREAMS[bar.kind]


def chrome_trace(timeline: Timeline) -> str:
    """The timeline as JSON for chrome://tracing and ui.perfetto.dev: a process for each rank, a thread for each stream."""
    streams = list(dict.fromkeys(STREAMS.values()))
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}
        for rank in sorted({bar.rank for bar in timeline.bars})
        for number, stream in enumerate(streams)
    ]
    for bar in timeline.bars:
        place = {"pid": bar.rank, "tid": streams.index(STREAMS[bar.kind]), "ts": bar.begin * 1e6, "dur": (bar.end - bar.begin) * 1e6}
        events.append({"ph": "X", "name": bar.name or bar.kind, "cat": bar.kind, **place})
    return json.dumps({"traceEvents": events, "otherData": {"simulated": timeline.simulated}})
