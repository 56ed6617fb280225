"""Two contenders, timed in turn: each in a process of its own, alternating, with the median ratio and its interval.

Machines are noisy, and noise comes in stretches, so single times say little. A pair is one round of each, back to back; the order within
pairs alternates. The median of the pairs' ratios is reported with an interval by order statistics, which assumes nothing about how the
noise is distributed.
"""

import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Round = Callable[[], dict[str, float]]  # does one round and returns its figures, `seconds` among them


@dataclass(frozen=True)
class Comparison:
    """The figures of each pair's rounds, ours and theirs."""

    ours: list[dict[str, float]]
    theirs: list[dict[str, float]]

    def ratios(self) -> list[float]:
        """How many times longer theirs took, pair by pair: above 1, ours is faster."""
        return [their["seconds"] / our["seconds"] for our, their in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios())

    @property
    def interval(self) -> tuple[float, float]:
        """At least 95 % sure to hold the true median of the ratios."""
        ordered = sorted(self.ratios())
        rank = interval_rank(len(ordered))
        return ordered[rank - 1], ordered[-rank]

    def median(self, who: str, figure: str = "seconds") -> float:
        return statistics.median(entry[figure] for entry in getattr(self, who))


def interval_rank(count: int) -> int:
    """The largest rank k for which the k-th smallest and k-th largest of `count` values hold the median with 95 %.

    Raises:
        ValueError: fewer than 6 values, for which there is none.
    """
    below = [math.comb(count, i) / 2**count for i in range(count + 1)]
    ranks = [k for k in range(1, count // 2 + 1) if 2 * sum(below[:k]) <= 0.05]
    if not ranks:
        raise ValueError(f"{count} pairs are too few for an interval of 95 %: take at least 6.")
    return max(ranks)


class Contender:
    """A process that prepares once and then does rounds on demand.

    Args:
        prepare: prepare(**options) -> a function that does one round; imported by the process, so a module-level function.
    """

    def __init__(self, prepare: Callable[..., Round], **options: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, prepare, options), daemon=True)
        self.process.start()

    def round(self) -> dict[str, float]:
        self.ask("round")
        return self.answer()

    def ask(self, what: str) -> None:
        """Begin a round, or what a method of that name of the prepared round does."""
        self.pipe.send(what)

    def answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"A contender failed: {answer}")
        return answer

    def close(self) -> None:
        self.pipe.send("stop")
        self.process.join(30)


class Ranks:
    """A contender of several processes that work together: all of them do their round at once, and the slowest one's figures count.

    Args:
        prepare: prepare(rank=0, meeting=a file to meet by, **options) in each process.
    """

    def __init__(self, prepare: Callable[..., Round], ranks: int, **options: Any):
        self.folder = tempfile.TemporaryDirectory()
        meeting = f"{self.folder.name}/meeting"
        self.contenders = [Contender(prepare, rank=rank, meeting=meeting, **options) for rank in range(ranks)]

    def asked(self, what: str) -> list[Any]:
        for contender in self.contenders:
            contender.ask(what)
        return [contender.answer() for contender in self.contenders]

    def round(self) -> dict[str, float]:
        return max(self.asked("round"), key=lambda figures: figures["seconds"])

    def close(self) -> None:
        for contender in self.contenders:
            contender.close()
        self.folder.cleanup()


def serve(pipe: Connection, prepare: Callable[..., Round], options: dict[str, Any]) -> None:
    try:
        one_round = prepare(**options)
        while (asked := pipe.recv()) != "stop":
            pipe.send(one_round() if asked == "round" else getattr(one_round, asked)())
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def compare(ours: Contender | Ranks, theirs: Contender | Ranks, pairs: int, warmup: int) -> Comparison:
    """`warmup` rounds of each, then `pairs` pairs with alternating order."""
    for _ in range(warmup):
        ours.round(), theirs.round()
    found = Comparison([], [])
    for number in range(pairs):
        for contender, kept in ((ours, found.ours), (theirs, found.theirs))[:: 1 if number % 2 else -1]:
            kept.append(contender.round())
    return found
