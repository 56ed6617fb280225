"""A training step simulated: a dry run records what one rank of many computes and communicates, and a replay times it over a chosen link.

    world = dry_run(4)
    ...                                              one step of any parallelism, on a mesh made of `world`
    replay([world.take_actions()] * 4, Link(latency=2e-5, bandwidth=1e10))

Where every core computes there is nothing to hide communication behind, and wall times show no overlap. So the real code runs once, in one
process, with a fake process group (`chapters/dry_run.py`). The replay then gives each rank one compute stream, and the link carries one
operation at a time:

    an operation starts   once every rank has begun it and the one before it is over
    it takes              latency * messages + bytes / bandwidth        (`shared.parallel.planning.costs`)
    a wait ends           once its operation is over; until then the rank computes nothing: this communication is exposed

Left out on purpose: several links, and the cycles that communication takes from computing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from chapters.dry_run import Action, Begin, Compute, Wait, dry_run  # noqa: F401 (who simulates a step begins with a dry run)
from shared.course import figures
from shared.parallel.planning.costs import Link, cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["compute", "communication", "idle"]
COLORS = {"compute": figures.COMPUTE, "communication": figures.COMMUNICATION, "idle": figures.IDLE}
STREAMS = {"compute": "compute", "idle": "compute", "communication": "link"}  # the row of a bar of each kind


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
