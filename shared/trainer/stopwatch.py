"""Chapter 12. Wall-clock time of a run's start, part by part, so that a report accounts for all of it."""

import time

IN_ALL = "seconds in all"  # the sum of all parts: leave it out where parts are added up


class Stopwatch:
    """Seconds of parts that follow each other without a gap.

    Args:
        began: when the first part began, on the clock of `time.perf_counter`; None for now.

    Attributes:
        seconds: part -> seconds, in order.
    """

    def __init__(self, began: float | None = None):
        self.began = self.mark = time.perf_counter() if began is None else began
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """End a part here; the next one begins."""
        before, self.mark = self.mark, time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + self.mark - before

    def add(self, parts: dict[str, float], others: float) -> None:
        """Take in the parts of an earlier process, and `others`: its seconds that are counted elsewhere."""
        for part, seconds in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.began -= sum(parts.values()) + others

    def total(self) -> float:
        """Seconds since the first part began, and of earlier processes."""
        return time.perf_counter() - self.began


def process_began() -> float:
    """When this process began, on the clock of `time.perf_counter`."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())
