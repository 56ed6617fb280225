"""Floor 0. The outcome of a check: plain data that travels between processes, and costs no import of torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, NOT_ATTEMPTED = "PASS", "FAIL", "NOT ATTEMPTED"


@dataclass
class Outcome:
    """The result of one check.

    cases, of: how many of the check's cases ran, the failing one included.
    rung, title: where it failed.
    problem: lines that say what was given, what came out, what was expected and who says so.
    misconception: the sentence of the mutant that the answer coincides with.
    printed: what the answer printed, clipped.
    fingerprint: which answer of a learner's file was checked; empty for any other function.
    """

    exercise: str
    state: str
    cases: int = 0
    of: int = 0
    rung: str = ""
    title: str = ""
    problem: list[str] = field(default_factory=list)
    misconception: str = ""
    printed: str = ""
    seconds: float = 0.0
    fingerprint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
