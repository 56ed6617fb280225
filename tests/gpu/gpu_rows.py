"""What a slice found, as rows: a claim that held or not, or a figure; and how a row reads on a machine without a GPU.

A row of a claim says what must be so and whether it was; a row of a figure only measures. On a CPU a claim about GPUs is never reported as
held: the row says "not measured: no GPU", and fails only where the code itself did what it must not do.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

HELD, FAILED, MEASURED = "held", "FAILED", "measured"
NO_GPU = "not measured: no GPU"


@dataclass
class Row:
    """One line of a slice's table.

    Args:
        what: what was looked at, in a few words.
        figures: name -> number or word, as JSON can hold them; None for a figure that this machine cannot measure.
        holds: whether the claim held; None for a row that only measures.
        note: a reason, a tolerance, what was replaced.
    """

    what: str
    figures: dict[str, Any] = field(default_factory=dict)
    holds: bool | None = None
    note: str = ""

    def state(self, on_gpu: bool) -> str:
        """`held`, `FAILED` or `measured`; without a GPU "not measured: no GPU" in place of the first and the last."""
        if self.holds is False:
            return FAILED
        if not on_gpu:
            return NO_GPU
        return MEASURED if self.holds is None else HELD

    def as_json(self, on_gpu: bool) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "holds"} | {"state": self.state(on_gpu)}


def failures(rows: list[dict[str, Any]]) -> int:
    return sum(row["state"] == FAILED for row in rows)


def in_words(figures: dict[str, Any]) -> str:
    """Figures for a cell of a table."""
    return ", ".join(f"{name} {shown(value)}" for name, value in figures.items())


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if value and (abs(value) < 1e-2 or abs(value) >= 1e6) else f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
