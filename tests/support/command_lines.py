"""Many command lines of a script in one process: what it says to each that ends before any work, or after very little.

Starting a process costs more than a refusal. `run_each` starts one (this file, as a program), which runs the script with each command line
in turn, and ends as the script ends with the last one: that exit code and standard error are what the system saw.
"""

import json
import runpy
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess

from scripts import code_of, run_script


def run_each(script: Path, lines: Iterable[Sequence[object]], cwd: Path, common: Sequence[object] = ()) -> dict[tuple, CompletedProcess]:
    """How the script ends, in `cwd`, for each command line: `common`, then the line's own words, which are its key.

    A process is bound once: a line that runs with another `--impl` needs a process of its own.
    """
    lines = [*map(tuple, lines)]
    with tempfile.TemporaryDirectory(prefix="lines-") as folder:
        asked, ended = Path(folder, "asked.json"), Path(folder, "ended.json")
        asked.write_text(json.dumps([[str(word) for word in (*common, *line)] for line in lines]))
        last = run_script(Path(__file__), script, asked, ended, cwd=cwd)
        assert ended.exists(), f"{script} ended its process before the last of its command lines: {last.stderr}"
        ends = [*json.loads(ended.read_text()), (last.returncode, last.stdout, last.stderr)]
    return {line: CompletedProcess([str(script), *line], *end) for line, end in zip(lines, ends, strict=True)}


def run_as_main(script: str, words: list[str]) -> None:
    sys.argv, sys.path[0] = [script, *words], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def end_of(script: str, words: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors, as of a process of its own."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = code_of(lambda: run_as_main(script, words))
    return code, output.getvalue(), errors.getvalue()


if __name__ == "__main__":
    script, asked, ended = sys.argv[1:]
    *lines, last = json.loads(Path(asked).read_text())
    Path(ended).write_text(json.dumps([end_of(script, line) for line in lines]))
    run_as_main(script, last)
