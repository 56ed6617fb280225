"""A script that Ctrl-C meets at a line that it prints: `python tests/support/interrupted.py PATTERN SCRIPT [words of the script]`.

The signal comes from the process itself, in the very write of that line. A test that watched the line and sent it would come too late
wherever it is kept waiting for longer than the rest of the run takes.
"""

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO


class Watched:
    """A stream that lets a signal go off after the first line that matches."""

    def __init__(self, stream: TextIO, pattern: str):
        self.stream, self.pattern, self.line = stream, re.compile(pattern), ""

    def write(self, text: str) -> int:
        written = self.stream.write(text)
        *lines, self.line = (self.line + text).split("\n")
        if self.pattern and any(map(self.pattern.match, lines)):
            self.pattern = None
            self.stream.flush()
            signal.raise_signal(signal.SIGINT)
        return written

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def interrupted(pattern: str, script: Path, *words, **options) -> subprocess.CompletedProcess:
    """Run a script that is interrupted after its first line that matches."""
    command = [sys.executable, __file__, pattern, str(script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


if __name__ == "__main__":
    pattern, *sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.stdout = Watched(sys.stdout, pattern)
    runpy.run_path(sys.argv[0], run_name="__main__")
