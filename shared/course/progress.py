"""Floor 0. The record of progress: `.course/progress.json` in the workspace, written atomically under a lock.

Per exercise: the fingerprint of the answer that passed last (`mixed` runs trust no other; gone after a failed check),
whether any answer ever passed, and the hints opened.
"""

import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from shared.course.errors import CourseError

ALL_HINTS = 3


class Progress:
    """The record of one workspace. Reading a missing record gives an empty one."""

    def __init__(self, workspace: Path):
        self.folder = workspace / ".course"
        self.path = self.folder / "progress.json"

    def read(self) -> dict[str, dict]:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            return {name: dict(entry) for name, entry in record.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CourseError(f"{self.path} cannot be read ({error}). Delete it: only the record of passes and hints is lost.") from None

    def passed(self, exercise_id: str) -> str | None:
        """The fingerprint of the answer that passed last."""
        return self.read().get(exercise_id, {}).get("passed")

    def hints(self, exercise_id: str) -> int:
        return self.read().get(exercise_id, {}).get("hints", 0)

    def opened(self, exercise_id: str) -> bool:
        """Whether the solution may be shown: an answer passed once, or every hint was read."""
        entry = self.read().get(exercise_id, {})
        return entry.get("solved", False) or entry.get("hints", 0) >= ALL_HINTS

    def record_check(self, exercise_id: str, fingerprint: str | None) -> bool:
        """Keep the outcome of a check (None: it did not pass). False where the folder cannot be written."""

        def ended(record: dict) -> None:
            entry = record.setdefault(exercise_id, {})
            entry["passed"] = fingerprint
            entry["solved"] = fingerprint is not None or entry.get("solved", False)

        return self._update(ended)

    def record_hint(self, exercise_id: str, rung: int) -> bool:
        def opened(record: dict) -> None:
            entry = record.setdefault(exercise_id, {})
            entry["hints"] = max(rung, entry.get("hints", 0))

        return self._update(opened)

    def _update(self, change: Callable[[dict], object]) -> bool:
        try:
            with self._locked():
                record = self.read()
                change(record)
                replace_text(self.path, json.dumps(record, indent=1, sort_keys=True) + "\n")
            return True
        except OSError:
            return False

    @contextmanager
    def _locked(self):
        """One writer at a time, so that two checks at once lose nothing."""
        import fcntl

        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # not a temporary file of the library's, which only its owner may read
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
