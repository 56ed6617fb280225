"""Chapter 04. What the engine must know of a run's processes: here there is one, so nothing is exchanged.

Some decisions have to be the same in all processes of a run, or one leaves while the others wait for it for ever: whether to stop, and
what held-out data says, by which the best checkpoint is chosen. The engine asks the world for both.

Left out on purpose: several processes. Chapter 06 brings a world with a communicator, and a `Saver` that gathers before it writes.
"""

from typing import Protocol

from shared.totals import Totals


class World(Protocol):
    """The processes of a run. Each method is called by all of them, at the same point."""

    def agree(self, reason: str | None) -> str | None:
        """The first reason that any process has, or None."""

    def add(self, totals: Totals) -> Totals:
        """The totals over all processes."""


class OneProcess:
    """A run in a single process."""

    def agree(self, reason: str | None) -> str | None:
        return reason

    def add(self, totals: Totals) -> Totals:
        return totals
