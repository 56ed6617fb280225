"""How the suite is shared out among workers: which tests stay together on one, and the longest first, by what they took in an earlier run.

`pytest -n 2 --record-durations` writes tests/durations.json, in seconds by the clock. What is missing there is taken for long.
"""

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
ALONE = "test_every_output_is_printed_again"  # a notebook shares nothing with another one
BY_CHAPTER = ("test_checks.py", "test_builds.py", "test_hunts.py")  # what these share, they keep by chapter


def scope_of(nodeid: str) -> str:
    """The name of what runs on one worker: a file, whose tests share runs, a notebook, or a chapter's part of a file."""
    file, _, test = nodeid.partition("::")
    if ALONE in test:
        return nodeid
    chapter = re.search(r"\[(\d\d)[._]", test) if file.endswith(BY_CHAPTER) else None
    return f"{file} {chapter[1]}" if chapter else file


@cache
def durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}


def place(item: pytest.Item) -> tuple[float, str]:
    """What items are sorted by: the longest scope first."""
    scope = scope_of(item.nodeid)
    return -durations().get(scope, float("inf")), scope


class Recorder:
    """A plugin of the process that hands out tests: writes down what each scope took, and keeps what is known of those that did not run."""

    def __init__(self):
        self.took = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            known = durations() | {scope: round(seconds, 1) for scope, seconds in self.took.items()}
            kept = {scope: known[scope] for scope in sorted(known) if (session.config.rootpath / re.split("::| ", scope)[0]).exists()}
            DURATIONS.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
