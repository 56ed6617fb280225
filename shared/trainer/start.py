"""Chapter 12. Starting a run in as many processes as its layout needs: `make run LAYOUT=fsdp2`.

    python -m shared.trainer.start fsdp2 chapters/12_grpo/laptop.yaml steps=100

A layout that cannot be is refused here, before anything starts. On several machines, call torchrun itself on `chapters/12_grpo/train.py`
with the same words after it: `parallel.fully_sharded=4 parallel.data_parallel=2`.
"""

import os
import sys
from pathlib import Path

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.parallel.config import AXES, ParallelConfig, parse_layout
from shared.trainer.settings import read_settings

TRAIN = CHECKOUT / "chapters" / "12_grpo" / "train.py"


def command_of(layout: str, words: list[str]) -> tuple[list[str], int]:
    """What to run for a layout's word and a configuration's words, and in how many processes.

    The run gets a folder of its own, named after the layout, unless the words say which.

    Raises:
        CourseError: a layout that cannot be, or no configuration.
    """
    if not words or "=" in words[0]:
        raise CourseError("Give a configuration after the layout, such as chapters/12_grpo/laptop.yaml.")
    said = dict(word.removeprefix("--").split("=", 1) for word in words[1:] if "=" in word)
    backend = said.get("parallel.backend", "course")
    try:
        config = parse_layout(layout, ParallelConfig(backend=backend))
    except ValueError as error:
        raise CourseError(str(error)) from error
    words = [*words, *(f"parallel.{name}={getattr(config, name)}" for name in (*AXES.values(), "zero"))]
    if "engine.output" not in said and config.ranks > 1:
        output = Path(read_settings(Path(words[0])).get("engine", {}).get("output", "runs/engine"))
        words.append(f"engine.output={output.with_name('-'.join([output.name, layout] + [backend] * (backend != 'course')))}")
    # They meet on this machine and by this name, whatever the machine calls itself, and whether anybody knows it by that.
    here = ["--standalone", "--local-addr", "localhost"]
    torchrun = ["-m", "torch.distributed.run", *here, "--nproc-per-node", str(config.ranks)] if config.ranks > 1 else []
    return [sys.executable, *torchrun, str(TRAIN), *words], config.ranks


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    command, ranks = command_of(words[0], words[1:])
    threads = str(max(1, (os.cpu_count() or 1) // ranks))  # torchrun gives each process one, however many cores there are
    os.execve(command[0], command, {"OMP_NUM_THREADS": threads} | os.environ)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CourseError as error:
        sys.exit(f"\n{error}")
