"""Chapter 04. Checkpoints as folders: a snapshot in safetensors and JSON, with the checksum of every file.

    checkpoints/step-00000200/weights.safetensors  optimizer.safetensors  random.safetensors  state.json  manifest.json

The manifest is written last and lists the size and SHA-256 of the others, so a file that was cut short or edited is named. Nothing is
unpickled, so a checkpoint from a stranger can hold wrong numbers and nothing worse. Names are logical: whole tensors, by the names of
the plain model, whatever layout wrote them.

Left out on purpose: tensors that are spread over processes. Chapter 06 hands in another `Storage`.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shared.course.errors import CourseError
from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.checkpoint.optimizer_state import OptimizerState
from shared.engine.checkpoint.random_state import RandomState
from shared.engine.checkpoint.snapshot import Snapshot
from shared.tensor_files import save_tensors

FORMAT = 1
FOLDER = re.compile(r"step-(\d{8})")
STATE, MANIFEST = "state.json", "manifest.json"


class CheckpointError(CourseError):
    """A checkpoint that cannot be written or read; the message says which, why, and what to do."""


class Storage(Protocol):
    """How named tensors become files in a folder."""

    def write(self, folder: Path, name: str, tensors: dict[str, Tensor]) -> None: ...

    def read(self, folder: Path, name: str) -> dict[str, Tensor]: ...


class Safetensors:
    """One file for each set of tensors."""

    def write(self, folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
        save_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")

    def read(self, folder: Path, name: str) -> dict[str, Tensor]:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {path.name}: several processes have written it, and it is read by a layout's storage."
            )
        return load_file(path)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds them; made when the first one is saved.
        keep_last: how many of the newest stay.
        keep_best: whether the one with the lowest validation loss stays as well.
        storage: how tensors are written.
    """

    def __init__(self, folder: Path, keep_last: int = 2, keep_best: bool = True, storage: Storage | None = None):
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.storage = storage or Safetensors()

    def steps(self) -> list[int]:
        """The steps that are saved, ascending, by the folders' names: nothing is opened."""
        found = [FOLDER.fullmatch(path.name) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, snapshot: Snapshot, notes: dict[str, Any] | None = None) -> Path:
        """Write a snapshot, whole or not at all, then remove what is no longer kept.

        Args:
            notes: what a reader of the folder wants to know, as JSON can hold it; `validation_loss` decides which is the best.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written. What was saved before is as it was.
        """
        target = self.path(snapshot.step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_save(target, lambda folder: self.write(folder, snapshot, notes or {}))
            self.remove_old(snapshot.step)
        except (OSError, SafetensorError) as error:
            raise self.unwritten(snapshot.step, reason_of(error)) from error
        return target

    def unwritten(self, step: int, reason: str) -> CheckpointError:
        """The error for a save that failed."""
        kept = f"Step {self.steps()[-1]} is still saved" if self.steps() else "Nothing is saved yet"
        return CheckpointError(
            f"The checkpoint of step {step} could not be written to {self.path(step)} ({reason}). {kept}: free space there, or choose "
            "another output folder."
        )

    def write(self, folder: Path, snapshot: Snapshot, notes: dict[str, Any]) -> None:
        optimizer = {f"{key}/{name}": tensor for name, tensors in snapshot.optimizer.tensors.items() for key, tensor in tensors.items()}
        self.storage.write(folder, "weights", snapshot.weights)
        self.storage.write(folder, "optimizer", optimizer)
        self.storage.write(folder, "random", snapshot.random.torch)
        (folder / STATE).write_text(json.dumps(state_of(snapshot, notes)), encoding="utf-8")
        files = {str(path.relative_to(folder)): fingerprint(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")

    def load(self, step: int) -> Snapshot:
        """Read a checkpoint after checking every file of it.

        Raises:
            CheckpointError: it is missing, incomplete, was changed, or was written by another version.
        """
        folder = self.path(step)
        self.require_intact(folder)
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has the format {state['format']}, and this version reads {FORMAT}: use the version that wrote it."
            )
        tensors: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in self.storage.read(folder, "optimizer").items():
            key, name = entry.split("/", 1)
            tensors.setdefault(name, {})[key] = tensor
        optimizer = OptimizerState(tensors, state["optimizer"]["values"], state["optimizer"]["groups"])
        random = RandomState(self.storage.read(folder, "random"), **state["random"])
        return Snapshot(state["step"], self.storage.read(folder, "weights"), optimizer, state["parts"], random)

    def require_intact(self, folder: Path) -> None:
        require_intact(folder)

    def newest(self, steps: Sequence[int] | None = None) -> tuple[Snapshot | None, list[str]]:
        """The newest checkpoint that is intact, and a sentence for each newer one that is not.

        Args:
            steps: among which, ascending; None for all.

        Raises:
            CheckpointError: there are checkpoints, and none is intact.
        """
        damaged = []
        for step in reversed(self.steps() if steps is None else steps):
            try:
                return self.load(step), damaged
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError("\n".join([*damaged, f"No checkpoint in {self.folder} is intact: remove that folder to start over."]))
        return None, []

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint, without checking the rest."""
        return json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))["notes"]

    def best(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss, where any of them was evaluated."""
        losses: dict[int, float] = {}
        for step in self.steps():
            try:
                loss = self.notes(step).get("validation_loss")
            except (OSError, ValueError, KeyError, AttributeError):  # damaged: not the best
                continue
            if loss is not None and math.isfinite(loss):
                losses[step] = loss
        return min(losses.items(), key=lambda entry: entry[1]) if losses else None

    def remove_old(self, written: int) -> None:
        """Keep the last ones up to `written`, and the best. What lies after it is of a future that was given up: the run went on from
        before it because it was damaged."""
        steps = [step for step in self.steps() if step <= written]
        best = self.best() if self.keep_best else None
        kept = {*steps[-self.keep_last :], *(best[:1] if best and best[0] <= written else ())}
        for step in set(self.steps()) - kept:
            doomed = self.path(step).rename(self.path(step).with_suffix(".removed"))  # a kill now leaves no half that looks whole
            shutil.rmtree(doomed)
        for leftover in [*self.folder.glob("*.removed"), *self.folder.glob("*.old")]:
            shutil.rmtree(leftover, ignore_errors=True)


def state_of(snapshot: Snapshot, notes: dict[str, Any]) -> dict[str, Any]:
    """What `state.json` holds: everything of a snapshot that is no tensor."""
    return {
        "format": FORMAT,
        "step": snapshot.step,
        "notes": notes,
        "parts": snapshot.parts,
        "optimizer": {"values": snapshot.optimizer.values, "groups": snapshot.optimizer.groups},
        "random": {key: value for key, value in asdict(snapshot.random).items() if key != "torch"},
    }


def reason_of(error: Exception) -> str:
    """The operating system's words, without its numbers."""
    return getattr(error, "strerror", None) or str(error)


def fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_intact(folder: Path, share: slice = slice(None)) -> None:
    """Refuse a checkpoint of which a file is missing, cut short or edited, by the file's name. share: of which files to compute checksums,
    where several processes divide them among themselves."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint {folder}.")
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"The checkpoint {folder} is damaged: its {MANIFEST} is missing or cannot be read.") from None
    hashed = list(wanted)[share]
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"The checkpoint {folder} is damaged: {name} is missing.")
        if path.stat().st_size != size:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes of {size}.")
        if name in hashed and fingerprint(path)["sha256"] != digest:
            raise CheckpointError(f"The checkpoint {folder} is damaged: {name} is not what was saved (its checksum differs).")
