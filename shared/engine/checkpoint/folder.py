"""Chapter 04. Checkpoints as folders: a snapshot in safetensors and JSON, with the checksum of every file.

    checkpoints/step-00000200/weights.safetensors  optimizer.safetensors  random.safetensors  state.json  manifest.json

The manifest is written last and lists the size and SHA-256 of the others, so a file that was cut short or edited is named; `state.json`
lists what the files must hold (`shared.engine.checkpoint.soundness`). Nothing is unpickled, so a checkpoint from a stranger can hold wrong
numbers and nothing worse. Names are logical: whole tensors, by the names of
the plain model, whatever layout wrote them.

Left out on purpose: tensors that are spread over processes. Chapter 06 hands in another `Storage`.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.checkpoint.optimizer_state import OptimizerState
from shared.engine.checkpoint.snapshot import RandomState, Snapshot, require_usable
from shared.engine.checkpoint.soundness import FORMAT, CheckpointError, DamagedCheckpoint, Described, described, difference, problem_of
from shared.engine.checkpoint.soundness import unlisted
from shared.output_files import system_reason
from shared.tensor_files import save_tensors

FOLDER = re.compile(r"step-(\d{8})")
STATE, MANIFEST = "state.json", "manifest.json"
Result = TypeVar("Result")


class Storage(Protocol):
    """How a set of named tensors is read from a folder.

    read(folder, name, expected): the tensors of the set `name`, after comparing them with `expected`, their entry in the table of contents.
    Raises DamagedCheckpoint where they differ.
    """

    def read(self, folder: Path, name: str, expected: Any) -> dict[str, Tensor]: ...


class Safetensors:
    """One file for each set of tensors."""

    def read(self, folder: Path, name: str, expected: Any) -> dict[str, Tensor]:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no {path.name}: several processes have written it, and it is read by a layout's storage."
            )
        tensors = load_file(path)
        if wrong := difference(described(tensors), expected):
            raise DamagedCheckpoint.of(folder, f"{wrong}.")
        return tensors


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds them; made when the first one is saved.
        keep_last: how many of the newest stay.
        keep_best: whether the one with the lowest validation loss stays as well.
        storage: how tensors are read.
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
        sets = {"weights": snapshot.weights, "optimizer": optimizer, "random": snapshot.random.torch}
        for name, tensors in sets.items():
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_tensors(tensors, folder / f"{name}.safetensors")
        contents = {name: described(tensors) for name, tensors in sets.items()}
        (folder / STATE).write_text(json.dumps(state_of(snapshot, notes, contents)), encoding="utf-8")
        files = {str(path.relative_to(folder)): fingerprint(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")

    def load(self, step: int) -> Snapshot:
        """Read a checkpoint after checking every file of it, and that it agrees with itself.

        Raises:
            DamagedCheckpoint: it is incomplete, was changed, or does not agree with itself.
            CheckpointError: it is missing, or was written by another version or another layout.
        """
        folder = self.path(step)
        self.require_intact(folder)
        try:
            state = read_state(folder, step)
            sets = state["contents"]["tensors"]
            tensors: dict[str, dict[str, Tensor]] = {}
            for entry, tensor in self.storage.read(folder, "optimizer", sets["optimizer"]).items():
                key, name = entry.split("/", 1)
                tensors.setdefault(name, {})[key] = tensor
            optimizer = OptimizerState(tensors, state["optimizer"]["values"], state["optimizer"]["groups"])
            weights = self.storage.read(folder, "weights", sets["weights"])
            return Snapshot(step, weights, optimizer, state["parts"], self.random_state(folder, state))
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint.of(folder, f"it cannot be read ({reason_of(error)}).") from error

    def random_state(self, folder: Path, state: dict[str, Any]) -> RandomState:
        return self.usable(folder, "random", state, state["random"])

    def usable(self, folder: Path, name: str, state: dict[str, Any], rest: dict[str, Any]) -> RandomState:
        """The random state of one process, which the generators can take."""
        torch_states = self.storage.read(folder, name, state["contents"]["tensors"].get(name))
        try:
            return require_usable(RandomState(torch_states, **rest))
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError) as error:
            raise DamagedCheckpoint.of(folder, f"its {name} is not a state of the generators ({error}).") from error

    def require_intact(self, folder: Path) -> None:
        require_intact(folder)

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest checkpoint that is intact, and a sentence for each newer one that is not.

        Raises:
            CheckpointError: there are checkpoints, and none is intact; or the newest is intact and cannot be read by this version.
        """
        return self.first_intact(self.load)

    def first_intact(self, use: Callable[[int], Result]) -> tuple[Result | None, list[str]]:
        """What use(step) returns for the newest checkpoint with which it does not raise DamagedCheckpoint, None where there are no
        checkpoints; and a sentence for each newer one."""
        steps, damaged = self.candidates()
        for step in reversed(steps):
            try:
                return use(step), damaged
            except DamagedCheckpoint as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError("\n".join([*damaged, f"No checkpoint in {self.folder} is intact: remove that folder to start over."]))
        return None, []

    def candidates(self) -> tuple[Sequence[int], list[str]]:
        """The steps from which a run may be resumed, ascending, and a sentence for each that is not among them."""
        return self.steps(), []

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; several ranks agree whether it failed (chapter 06)."""
        return call()

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint, without checking the rest."""
        return json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))["notes"]

    def best(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss, where any of them was evaluated."""
        losses: dict[int, float] = {}
        for step in self.steps():
            try:
                loss = self.notes(step).get("validation_loss")
                if loss is not None and math.isfinite(loss):
                    losses[step] = loss
            except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: not the best
                continue
        return min(losses.items(), key=lambda entry: entry[1]) if losses else None

    def remove_old(self, written: int) -> None:
        """Keep the last ones up to `written`, and the best. Later steps are dropped: they were damaged, and the run resumed from an
        earlier one."""
        steps = [step for step in self.steps() if step <= written]
        best = self.best() if self.keep_best else None
        kept = {*steps[-self.keep_last :], *(best[:1] if best and best[0] <= written else ())}
        for step in set(self.steps()) - kept:
            doomed = self.path(step).rename(self.path(step).with_suffix(".removed"))  # a kill now leaves no half that looks whole
            shutil.rmtree(doomed)
        for leftover in [*self.folder.glob("*.removed"), *self.folder.glob("*.old")]:
            shutil.rmtree(leftover, ignore_errors=True)


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """What `state.json` holds.

    Raises:
        DamagedCheckpoint: it does not agree with itself, or with the name of its folder.
        CheckpointError: it is of another format.
    """
    try:
        problem = problem_of(state := json.loads((folder / STATE).read_text(encoding="utf-8")), step)
    except (ValueError, RecursionError):
        problem = f"its {STATE} is not JSON"
    except CheckpointError as error:
        raise CheckpointError(f"{folder} {error}") from None
    if problem:
        raise DamagedCheckpoint.of(folder, f"{problem}.")
    return state


def state_of(snapshot: Snapshot, notes: dict[str, Any], tensors: dict[str, Described]) -> dict[str, Any]:
    """What `state.json` holds: everything of a snapshot but its tensors, and a table of contents. tensors: the tensors of each set."""
    return {
        "format": FORMAT,
        "step": snapshot.step,
        "notes": notes,
        "parts": snapshot.parts,
        "optimizer": {"values": snapshot.optimizer.values, "groups": snapshot.optimizer.groups},
        "random": {key: value for key, value in asdict(snapshot.random).items() if key != "torch"},
        "contents": {"parts": list(snapshot.parts), "tensors": tensors},
    }


def reason_of(error: Exception) -> str:
    """The operating system's words, without its numbers."""
    return system_reason(error) or str(error)


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
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedCheckpoint.of(folder, f"its {MANIFEST} is missing or cannot be read.") from None
    hashed = list(wanted)[share]
    if STATE not in wanted:
        raise DamagedCheckpoint.of(folder, f"its {MANIFEST} does not list {STATE}.")
    if stranger := unlisted(folder, wanted):
        raise DamagedCheckpoint.of(folder, f"its {MANIFEST} does not list {stranger}.")
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint.of(folder, f"{name} is missing.")
        if path.stat().st_size != size:
            raise DamagedCheckpoint.of(folder, f"{name} has {path.stat().st_size} bytes of {size}.")
        if name in hashed and fingerprint(path)["sha256"] != digest:
            raise DamagedCheckpoint.of(folder, f"{name} is not what was saved (its checksum differs).")
