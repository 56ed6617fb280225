"""Chapter 12. Continue (fork) a run in another folder: `continue_from` takes a checkpoint whole, as if the run's folder had been copied.

    start_from      the weights alone: step 0, an empty optimizer, the data from its start
    continue_from   the weights, the optimizer's state, the step, the place in the data, random numbers: bit for bit the same run

The new folder gets the checkpoint, the record of the run, its metrics and its history. What follows is a resume, and what differs from that
run is asked for as in any other (`shared.trainer.records.changes`). Trackers begin runs of their own.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from shared.course.errors import CourseError, SettingError
from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.checkpoint.folder import FOLDER, MANIFEST, STATE, Checkpoints, fingerprint, require_intact
from shared.engine.checkpoint.saver import CALLBACK
from shared.engine.checkpoint.soundness import CheckpointError
from shared.engine.trackers import TRACKERS
from shared.folder_lock import NAME as LOCK
from shared.output_files import write_atomically, writing
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.records import history
from shared.trainer.records.changes import require_allowed, unresolved
from shared.trainer.records.history import changes_of

METRICS = "metrics.jsonl"
OF_TRACKERS = {f"{CALLBACK}{TRACKERS[name].__name__}" for name in ("wandb", "mlflow")}  # whose states are the names of their runs


def copy_run(config: TrainerConfig, console: Console) -> set[str] | None:
    """Put the checkpoint of `continue_from` into the run's folder, with what belongs to it, unless the folder has checkpoints already. The
    checkpoint comes last: without it nothing is resumed, and a killed copy is made again.

    Returns:
        The names that the folder had before, for `remove_copy`; None where nothing was copied.

    Raises:
        CourseError: there is no such run or no intact checkpoint, or the folder holds another run.
    """
    output, wanted = config.engine.output, config.continue_from
    if Checkpoints(output / "checkpoints").steps():
        if provenance.saved_value(output, "continue_from") != str(wanted):
            raise CourseError(
                f"{output} holds a run that was not continued from {wanted}: leave continue_from out to resume it, or give another "
                "engine.output."
            )
        return None
    before = set(os.listdir(output)) if output.exists() else set()
    folder = find_checkpoint(wanted)
    run, step = folder.parent.parent, int(FOLDER.fullmatch(folder.name)[1])
    record = provenance.read_record(run / provenance.CONFIG)
    require_allowed(record, provenance.plain(config), run, config.continue_with, unresolved(config))
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        provenance.write_settings(record | {"continue_from": str(wanted)}, output)
        for name in (provenance.START, provenance.CODE, METRICS, history.FILE):
            (output / name).unlink(missing_ok=True)
            if (run / name).is_file():
                write_atomically(output / name, (run / name).read_bytes())
        if (run / "tokenizer").is_dir():
            shutil.copytree(run / "tokenizer", output / "tokenizer", dirs_exist_ok=True)
        if not changes_of(output) or changes_of(output)[-1].source != str(folder):
            history.append(output, {"event": "continued", "step": step, "from": str(folder)})
        (output / "checkpoints").mkdir(exist_ok=True)
        atomic_save(output / "checkpoints" / folder.name, lambda target: copy_checkpoint(folder, target))
    console.print(f"{folder} is continued in {output}.", markup=False, highlight=False, soft_wrap=True)
    return before


def nothing_to_continue(config: TrainerConfig) -> list[str]:
    """The line for a `continue_with` where no checkpoint is. No error: the words may stay in a command that begins runs."""
    output, words = config.engine.output, ",".join(config.continue_with)
    if not words or Checkpoints(output / "checkpoints").steps():
        return []
    return [f"{output} holds no checkpoint to continue: the run begins at step 0, and continue_with={words} has no effect."]


def remove_copy(output: Path, before: set[str]) -> None:
    """Undo `copy_run` after a refused start. before: names in the folder before the copy."""
    for name in {*os.listdir(output)} - before - {LOCK}:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.rmtree(output / "checkpoints", ignore_errors=True)


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path, or the newest intact one of the run there."""
    if FOLDER.fullmatch(path.name):
        run, folders = path.parent.parent, [path]
    else:
        run, checkpoints = path, Checkpoints(path / "checkpoints")
        folders = [checkpoints.path(step) for step in reversed(checkpoints.steps())]
    if not (run / provenance.CONFIG).is_file() or not folders:
        raise SettingError(f"continue_from is {path}, which is no run with a checkpoint: give a run's folder, or a checkpoint's in it.")
    for folder in folders:
        try:
            require_intact(folder)
            return folder
        except CheckpointError as error:
            problem = error
    raise problem


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Copy a checkpoint's files, without the run ids of trackers."""
    for path in folder.iterdir():
        if path.name not in (STATE, MANIFEST):
            shutil.copyfile(path, target / path.name)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    kept = {name: part for name, part in state["parts"].items() if name not in OF_TRACKERS}
    state |= {"parts": kept, "contents": state["contents"] | {"parts": list(kept)}}
    (target / STATE).write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8")) | {STATE: fingerprint(target / STATE)}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
