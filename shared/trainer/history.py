"""Chapter 12. Event log of a run, `history.jsonl` in its folder: which ranks were there from which step on, and which settings changed.

A line is appended in one write, because ranks may add theirs at the same time. `shared.trainer.elastic` and `shared.trainer.retuning` say
what is in them.
"""

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

FILE = "history.jsonl"


def append(output: Path, event: dict[str, Any]) -> None:
    """Add an event to the history of the run in this folder."""
    event = {"time": datetime.now().astimezone().isoformat(" ", "seconds")} | event
    with (output / FILE).open("ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\n")


def events_of(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's history, oldest first; a line that a crash cut off is left out. Empty where a run has none."""
    found = []
    with suppress(FileNotFoundError):
        for line in (output / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found
