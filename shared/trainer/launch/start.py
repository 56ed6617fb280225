"""Chapter 12. Launcher: a run with torchrun, in as many processes as its layout needs: `make run LAYOUT=fsdp2`.

    python -m shared.trainer.launch.start fsdp2 chapters/12_grpo/laptop.yaml steps=100

What cannot be, a layout or any other setting, is refused here, before anything starts. On several machines, call torchrun itself on
`chapters/12_grpo/train.py` with the same words after it: `parallel.fully_sharded=4 parallel.data_parallel=2`.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.course.bounds import OutOfBounds
from shared.course.errors import CourseError, SettingError
from shared.course.launch import end_quietly_on_interrupt, refuse
from shared.course.paths import CHECKOUT
from shared.course.strict_yaml import parse_yaml, read_yaml
from shared.finetune.gguf.packaged import is_gguf
from shared.parallel.config import AXES, VIEWS, ParallelConfig, layout_name, parse_layout
from shared.trainer.settings import parse_words, read_settings, require_usable

MOST_RANKS = 16  # for each core of this machine
STARTS = {"start_from": "start_config", "ppo.reward_model": "ppo.reward_config"}  # what names a model -> what says how it is trained
TRAIN = CHECKOUT / "chapters" / "12_grpo" / "train.py"


def command_of(layout: str, words: list[str]) -> tuple[list[str], int]:
    """The command of a run in a layout, and its number of processes.

    The run gets a folder of its own, named after the layout, unless an override names one.
    """
    if not words or "=" in words[0]:
        raise CourseError("Give a configuration after the layout, such as chapters/12_grpo/laptop.yaml.")
    said = dict(word.removeprefix("--").split("=", 1) for word in words[1:] if "=" in word)
    asked = {key: parse_yaml(text, key) for key, text in said.items() if key.split(".")[0] in ("parallel", "engine")}
    try:
        config = parse_layout(layout, ParallelConfig(backend=said.get("parallel.backend", "course")))
        written = read_settings(Path(words[0]))
        backend = said.get("parallel.backend") or section(written, "parallel").get("backend", "course")
        by_sequence = asked.get("parallel.sequence_parallel", section(written, "parallel").get("sequence_parallel"))
        config = replace(config, backend=backend, sequence_parallel=config.sequence_parallel or by_sequence is True)
    except CourseError:
        raise
    except OutOfBounds as error:
        raise SettingError(f"parallel.{error}") from error
    except ValueError as error:
        raise SettingError(str(error)) from error
    of_words = {key.removeprefix("parallel."): value for key, value in asked.items() if key.startswith("parallel.")}
    for where, parallel in ((words[0], section(written, "parallel")), ("the command line", section(asked, "parallel") | of_words)):
        require_agreement(layout, config, parallel, where)
    if config.ranks > MOST_RANKS * (os.cpu_count() or 1):
        raise SettingError(f"LAYOUT {layout} needs {config.ranks} processes, and this machine has {os.cpu_count()} CPU cores: give fewer.")
    degrees = (*AXES.values(), *VIEWS.values(), "zero", "sequence_parallel")
    words = [*words, *(f"parallel.{name}={getattr(config, name)}" for name in degrees)]
    output = section(written, "engine").get("output", "runs/engine")
    named = "engine.output" in said or "output" in section(asked, "engine")
    if not named and config.ranks > 1 and isinstance(output, str) and output:  # another one is refused with the other settings
        output = Path(output)
        name = "-".join([output.name, layout_name(config)] + [backend] * (backend != "course"))  # the report looks for this name
        words.append(f"engine.output={output.with_name(name)}")
    # They meet on this machine and by this name, whatever the machine calls itself, and whether anybody knows it by that.
    here = ["--standalone", "--local-addr", "localhost"]
    launcher = ["-m", "torch.distributed.run", *here, "--nproc-per-node", str(config.ranks)] if config.ranks > 1 else []
    return [sys.executable, *launcher, str(TRAIN), *words], config.ranks


def with_microbatches(words: list[str]) -> list[str]:
    """A configuration's words with a `data.micro_batch_size` that gives a pipeline something to do at once: twice as many micro-batches as
    stages, where the rows of a step allow it. It is the user's alone where the words or a file of theirs name it. Losses stay as they are,
    but for rounding.

    Raises:
        CourseError: settings that are refused.
    """
    from shared.trainer.config import TrainerConfig
    from shared.trainer.planner.memory import step_sizes

    config = parse_words(TrainerConfig, words)
    step, stages, asked = step_sizes(config), config.parallel.pipeline_parallel, config.data.micro_batch_size
    size = step.rows
    while size % 2 == 0 and step.rows // size * step.microbatches < 2 * stages:
        size //= 2
    named = {word.removeprefix("--").split("=", 1)[0] for word in words}
    if stages == 1 or size == step.rows or named & {"data", "data.micro_batch_size"}:
        return words
    count = step.rows // size * step.microbatches
    if names_size(Path(words[0])):
        now = f"{stages} stages have {step.microbatches} micro-batches in a step"
        said = f"{now}, and with data.micro_batch_size={size} {count}, where they wait less"
        print(f"data.micro_batch_size stays {asked}, as {words[0]} says: {said}.", flush=True)
        return words
    said = f"{stages} stages have {count} micro-batches in a step and wait less. To choose another size, name it."
    print(f"data.micro_batch_size is {size} here and not {asked}, so that {said}", flush=True)
    return [*words, f"data.micro_batch_size={size}"]


def names_size(file: Path) -> bool:
    """Whether a configuration, or one that it extends, is the user's own and names `data.micro_batch_size`. The course's files name
    one for a single process."""
    own = [settings for each, settings in files_below(file) if not each.is_relative_to(TRAIN.parent)]
    return any("micro_batch_size" in section(settings, "data") for settings in own)


def files_below(file: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A configuration and those that it extends, each with its own settings; `read_settings` has checked that they can be read."""
    file = Path(os.path.realpath(file))
    settings = read_yaml(file)
    yield file, settings
    if settings.get("extends") is not None:
        yield from files_below(file.parent / settings["extends"])


def with_start(words: list[str]) -> list[str]:
    """A configuration's words, after the model that it starts from has been trained, where that is not there yet and `start_config` says
    how: the words then name that model. Called before anything of several ranks.

    Raises:
        CourseError: a file that cannot be read.
        SystemExit: settings are refused, before that training; it ended with an error, or was interrupted.
    """
    if not words or "=" in words[0] or words[0].startswith("-"):
        return words  # refused with the other settings
    settings, keys = read_settings(Path(words[0])), {word.removeprefix("--").split("=")[0] for word in words[1:]}
    for setting, maker in STARTS.items():
        wanted, smaller = setting_of(settings, setting), setting_of(settings, maker)
        if keys & {setting, maker} or not isinstance(wanted, str) or not isinstance(smaller, str):
            continue
        giver = next(each for each, said in files_below(Path(words[0])) if setting_of(said, maker) is not None)
        file = Path(os.path.relpath(giver.parent / smaller))
        output = Path(section(read_settings(file), "engine").get("output", "runs/engine"))
        is_trained = (output / "model" / "config.json").is_file()
        if is_trained if output == Path(wanted) else Path(wanted).is_dir() or is_gguf(wanted):
            continue
        if not is_trained:
            from shared.trainer.config import TrainerConfig

            require_usable(TrainerConfig, words)
            smaller = f" (`make run` trains it): a smaller model is trained first, in {output}."
            print(f"{wanted} is not there yet{f': {file.name} trains it first.' if output == Path(wanted) else smaller}", flush=True)
            shared = [word for word in words[1:] if word.removeprefix("--").split("=")[0] in ("impl", "engine.device", "data.prepared")]
            code = subprocess.run([sys.executable, str(TRAIN), str(file), *shared], check=False).returncode
            if code:
                sys.exit(code)
        words = [*words, f"{setting}={output}"]
    return words


def setting_of(settings: dict[str, Any], name: str) -> Any:
    """A setting of the file, or of one of its sections; None if it is not given."""
    of, _, last = name.rpartition(".")
    return (section(settings, of) if of else settings).get(last)


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a section; empty for a wrong value, which is refused with the other settings."""
    return found if isinstance(found := settings.get(name), dict) else {}


def require_agreement(layout: str, config: ParallelConfig, parallel: dict[str, Any], where: str) -> None:
    """Refuse degrees of the section `parallel` that contradict the layout."""
    said = ["sequence_parallel"] * ("sp" in layout.split("_"))
    for name in (*AXES.values(), *VIEWS.values(), "zero", *said):
        if name in parallel and parallel[name] != getattr(config, name):
            raise SettingError(
                f"LAYOUT {layout} means parallel.{name}={getattr(config, name)}, and {where} gives {parallel[name]!r}: leave one out."
            )


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    try:
        command, ranks = command_of(words[0], with_start(words[1:]))
    except CourseError as error:
        refuse(error)
    if ranks == 1:
        os.execv(command[0], command)
    from shared.trainer.config import TrainerConfig
    from shared.trainer.launch.elastic import keep_running

    # Refused here, or each rank would refuse the same, and torchrun add a page.
    place = command.index(str(TRAIN)) + 1
    command[place:] = with_microbatches(command[place:])
    config = parse_words(TrainerConfig, command[place:])
    # torchrun gives each process one thread, however many cores there are.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if config.elastic:
        place = command.index("--nproc-per-node") + 1
        sys.exit(keep_running(config, lambda count: torchrun([*command[3:place], str(count), *command[place + 1 :]])))
    sys.exit(torchrun(command[3:]))


def torchrun(words: Sequence[str]) -> int:
    """Start the ranks, and wait for them: torchrun without its pages of where its own code stands. Returns what to exit with, which is the
    code of the first rank that failed, or the one that shells give to the signal."""
    # After Ctrl-C each rank ends its step and saves, for which torchrun alone would give them half a minute.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.WARNING)  # its lines about the signal that it passes on, three for two ranks; its errors are shown
    logging.getLogger("torch.distributed.elastic.multiprocessing.errors.error_handler").setLevel(logging.CRITICAL)  # what a rank has said
    try:
        run.main(list(words))
    except ChildFailedError as error:  # the rank has said why
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


if __name__ == "__main__":
    end_quietly_on_interrupt()
    try:
        main(sys.argv[1:])
    except CourseError as error:
        refuse(error)
