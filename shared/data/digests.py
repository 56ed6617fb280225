"""Chapter 03. Content hashes (SHA-256) of source files, kept between runs, so that prepared text is keyed by content.

The time of modification is not used: a copy or a checkout changes it without changing a byte, and tools like rsync set it to what it was.
Reading and hashing takes 0.5 to 1.5 seconds for each GB, more on a slow disk; a file that has not been written since costs one `stat`.

A kept hash counts while path, device, inode, size, and both times are equal. The second time (ctime) is the one that matters: the kernel
sets it at each write, and no program can set it back. It moves in ticks of some milliseconds, so the hash of a file that was written less
than `SETTLED` seconds before it was read is not kept: another write could fall into the same tick (git's "racy" entries).

Left out on purpose: datasets of the hub, which are known by name and revision.
"""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from shared.course.errors import CourseError
from shared.output_files import write_atomically

SETTLED = 10.0  # seconds; file servers' clocks may be off by a few


class Digests:
    """Content hashes of files.

    Args:
        path: where they are kept, as JSON; made by `save`. A file that cannot be read is begun again.
    """

    def __init__(self, path: Path):
        self.path, self.changed = path, False
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            kept = {}
        self.kept: dict[str, list] = kept if isinstance(kept, dict) else {}

    def of(self, file: Path) -> str:
        """The SHA-256 of a file's content, read only where it may have changed.

        Raises:
            OSError: it cannot be read.
        """
        now, found = time.time(), file.stat()
        key = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        kept = self.kept.get(str(file.absolute()))
        if isinstance(kept, list) and len(kept) == 2 and kept[0] == key:
            return kept[1]
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if now - found.st_ctime > SETTLED:
            self.kept[str(file.absolute())], self.changed = [key, digest], True
        return digest

    def save(self) -> None:
        """Keep the hashes, where the folder can be written to: in one that can only be read they are computed at each start."""
        if self.changed:
            with suppress(CourseError):
                write_atomically(self.path, json.dumps(self.kept).encode())
