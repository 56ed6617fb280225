"""Chapter 12. Training pipeline by one command: stages that are skipped where finished and resumed where stopped.

    make run PIPELINE=laptop                the same as this:
    python -m shared.trainer.pipeline.chain chapters/12_grpo/pipelines/laptop.yaml
    ... layout=dp2                          every stage on two processes, but for those that the file gives a layout
    ... output=runs/mine steps=100          a setting for all stages
    ... stages.sft.steps=100                a setting for one of them

Each stage is a process of the trainer. After each one its model is judged beside those before it, and the report is written again.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shared.course import binding
from shared.course.errors import CourseError
from shared.course.launch import INTERRUPTED, end_quietly_on_interrupt, refuse

if TYPE_CHECKING:
    from shared.trainer.pipeline.stages import Pipeline, Stage


def run_pipeline(pipeline: "Pipeline", console: Console) -> None:
    """Run each stage that is not finished, and write the report after each.

    Raises:
        SystemExit: a stage ended before its time; with its code, in the way of shells.
        CourseError: a finished stage does not fit what is asked for now.
    """
    from shared.folder_lock import held_folder
    from shared.output_files import write_atomically
    from shared.trainer.pipeline.abilities import measure_all, measure_of
    from shared.trainer.pipeline.report import show, write_report
    from shared.trainer.pipeline.stages import RECORD

    stages, measures = pipeline.stages, {}
    with held_folder(pipeline.output, True, console):
        for number, stage in enumerate(stages, 1):
            place = f"Stage {number} of {len(stages)}, {stage.name}"
            if is_new := not stage.is_finished():
                console.rule(place)
                require_end(run_stage(stage), place)
                write_atomically(stage.folder / RECORD, json.dumps(stage.record(), indent=1).encode())
            else:
                console.print(f"{place}: finished, in {stage.folder}.", highlight=False)
            if measure := measure_of(stage):
                measures[stage.name] = measure
            if is_new or number == len(stages):
                measure_all(stages[:number], measures, console)
                report = write_report(pipeline)
    show(pipeline, console)
    console.print(f"The report: {report}", markup=False, highlight=False, soft_wrap=True)


def run_stage(stage: "Stage") -> int:
    """Train a stage in separate processes; returns the exit code, negative if a signal killed it."""
    from shared.trainer.launch.start import TRAIN

    launcher = ["-m", "shared.trainer.launch.start", stage.layout] if stage.layout else [str(TRAIN)]
    with passed_on() as started:
        child = subprocess.Popen([sys.executable, *launcher, str(stage.file), *stage.words], start_new_session=True)
        started(child)
        return child.wait()


@contextmanager
def passed_on() -> Iterator[Callable[[subprocess.Popen], None]]:
    """Forward Ctrl-C, SIGTERM and SIGHUP to the given process, which saves and exits; also if they came before it started."""
    children: list[subprocess.Popen] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        early.append(number)
        for child in children:
            child.send_signal(number)

    def started(child: subprocess.Popen) -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield started
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def require_end(code: int, place: str) -> None:
    """Exit if a stage did not finish, and say how to continue.

    Raises:
        SystemExit: with the stage's code, or the one that shells give to the signal that killed it.
    """
    if code == 0:
        return
    again = "the same command continues there, and keeps the stages before it."
    if code in (INTERRUPTED, 128 + signal.SIGTERM):
        print(f"\n{place}: stopped; {again}", file=sys.stderr)
    elif code < 0:
        print(f"\n{place}: killed by {signal.Signals(-code).name}; {again}", file=sys.stderr)
    else:
        print(f"\n{place}: failed with exit code {code}, for the reason above. Mend it; then {again}", file=sys.stderr)
    sys.exit(code if code > 0 else 128 - code)


def main(words: list[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0 if words else 2)
    said = [word.partition("=")[2] for word in words[1:] if word.removeprefix("--").startswith("impl=")]
    binding.choose(said[-1] if said else "reference")  # before the core is imported
    from shared.trainer.pipeline.stages import read_pipeline

    try:
        pipeline = read_pipeline(Path(words[0]), words[1:])
    except CourseError as error:
        refuse(error)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_pipeline(pipeline, Console(markup=False, emoji=False))


if __name__ == "__main__":
    end_quietly_on_interrupt()
    try:
        main(sys.argv[1:])
    except CourseError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        print("\nStopped. The same command continues.", file=sys.stderr)
        sys.exit(INTERRUPTED)
