"""Floor 0. Release checksums: whether the files that a learner does not edit are as they were released.

`released.json` lists the core, the solutions, the checks and the mutants, and what the generator made of each chapter's stubs.
A maintainer's `course release` writes it; `course check` and `course doctor` compare. It guards against slips of the
hand, not against intent: somebody who edits the core can also record it again.
"""

import hashlib
import json
from pathlib import Path

from shared.course import catalogue, stubs
from shared.course.paths import CHECKOUT
from shared.course.progress import replace_text
from shared.course.report import count

MANIFEST = Path(__file__).with_name("released.json")
EXERCISES = ("tests/exercises/checks/**/*.py", "tests/exercises/mutants/*.toml", "chapters/*/exercises.toml")
WHOLE = ("tests/exercises/builds/**/*.*", "tests/exercises/hunts/*.*")  # of builds and hunts
GUARDED = ("shared/**/*.py", "solutions/**/*.py", *EXERCISES, *WHOLE)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def guarded_files() -> dict[str, str]:
    """Path from the checkout, with forward slashes -> checksum of the file as it is now."""
    paths = sorted(path for pattern in GUARDED for path in CHECKOUT.glob(pattern))
    return {path.relative_to(CHECKOUT).as_posix(): checksum(path.read_bytes()) for path in paths}


def current() -> dict[str, dict[str, str]]:
    """What the manifest of this checkout would say."""
    made = {chapter.slug: checksum(stubs.stub_file(chapter).encode()) for chapter in catalogue.chapters().values()}
    return {"files": guarded_files(), "stubs": made}


def recorded() -> dict[str, dict[str, str]]:
    return json.loads(MANIFEST.read_text(encoding="utf-8"))


def write_manifest() -> None:
    replace_text(MANIFEST, json.dumps(current(), indent=1, sort_keys=True) + "\n")


def edited() -> list[str]:
    """The guarded files that differ from their release, are missing, or were added."""
    if not MANIFEST.exists():
        return [MANIFEST.relative_to(CHECKOUT).as_posix()]
    before, now = recorded()["files"], guarded_files()
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def edited_sentence() -> str:
    """One line for a reader whose core is not the released one; empty where it is."""
    files = edited()
    more = f" and {count(len(files) - 1, 'other file')}" if len(files) > 1 else ""
    return f"Not as released: {files[0]}{more} (`course doctor`)." if files else ""
