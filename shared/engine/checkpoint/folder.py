"""Chapter 04. Checkpoints as folders, saved and loaded: a snapshot in safetensors and JSON, with the checksum of every file.

    checkpoints/step-00000200/weights.safetensors  optimizer.safetensors  random.safetensors  state.json  manifest.json

The manifest is written last and lists the size and SHA-256 of the others, so a file that was cut short or edited is named; `state.json`
lists what the files must hold (`shared.engine.checkpoint.soundness`). Nothing is unpickled, so a checkpoint from a stranger can hold wrong
numbers and nothing worse. Names are logical, those of the plain model, whatever layout wrote them.

Left out on purpose: what several processes must agree on before a folder is complete. Chapter 06 adds it (`shared.parallel.checkpoint`).
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.checkpoint.files import ShardFiles, Shards, contents_of, fingerprint, rank_file, whole_shards, write_files
from shared.engine.checkpoint.optimizer_state import OptimizerState
from shared.engine.checkpoint.snapshot import RandomState, Snapshot, get_random_state, require_usable
from shared.engine.checkpoint.soundness import FORMAT, RANDOM_STATE, CheckpointError, DamagedCheckpoint, Described, misfit, problem_of
from shared.engine.checkpoint.soundness import unlisted
from shared.output_files import system_reason

FOLDER = re.compile(r"step-(\d{8})")
STATE, MANIFEST = "state.json", "manifest.json"
LEFTOVERS = (".removed", ".old", ".ranks")  # endings of folders that killed processes leave behind
RANDOM_OF_RANKS = "random_of_ranks"  # in the state: Python's and NumPy's random state of the ranks after the first
Result = TypeVar("Result")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds them; made when the first one is saved.
        keep_last: how many of the newest stay.
        keep_best: whether the one with the lowest validation loss stays as well.
        shards: reads what this process holds of each tensor; None for all of it.
    """

    rank = 0  # whose random state `load` takes

    def __init__(self, folder: Path, keep_last: int = 2, keep_best: bool = True, shards: ShardFiles | None = None):
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.shards = shards or ShardFiles()

    def steps(self) -> list[int]:
        """The saved steps, ascending, by folder name: nothing is opened."""
        found = [FOLDER.fullmatch(path.name) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, snapshot: Snapshot, notes: dict[str, Any] | None = None) -> Path:
        """Write a snapshot of a single process, as `write` does.

        Args:
            notes: what a reader of the folder wants to know, as JSON can hold it; `validation_loss` decides which is the best.
        """
        files = whole_files(snapshot)
        return self.write(snapshot.step, files, state_text(snapshot, notes or {}, contents_of(files)))

    def write(self, step: int, files: Mapping[str, Shards], state: str) -> Path:
        """Write a checkpoint atomically, then remove those that are no longer kept.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written. What was saved before is as it was.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_save(self.path(step), lambda folder: complete(folder, write_files(folder, files), state))
            self.remove_old(step)
        except (OSError, SafetensorError) as error:
            raise self.unwritten(step, reason_of(error)) from error
        return self.path(step)

    def unwritten(self, step: int, reason: str) -> CheckpointError:
        """The error for a save that failed."""
        kept = f"Step {self.steps()[-1]} is still saved" if self.steps() else "Nothing is saved yet"
        return CheckpointError(
            f"The checkpoint of step {step} could not be written to {self.path(step)} ({reason}). {kept}: free space there, or choose "
            "another output folder."
        )

    def load(self, step: int) -> Snapshot:
        """Read a checkpoint, of any layout, after checking every file of it, and that it is consistent.

        Raises:
            DamagedCheckpoint: it is incomplete, was changed, or is inconsistent.
            CheckpointError: it is missing, or was written by another version.
        """
        folder = self.path(step)
        self.require_intact(folder)
        try:
            state = read_state(folder, step)
            sets = state["contents"]["tensors"]
            tensors: dict[str, dict[str, Tensor]] = {}
            for entry, tensor in self.shards.read(folder, "optimizer", sets["optimizer"]).items():
                key, name = entry.split("/", 1)
                tensors.setdefault(name, {})[key] = tensor
            optimizer = OptimizerState(tensors, state["optimizer"]["values"], state["optimizer"]["groups"])
            weights = self.shards.read(folder, "weights", sets["weights"])
            return Snapshot(step, weights, optimizer, state["parts"], self.random_state(folder, state))
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint.of(folder, f"it cannot be read ({reason_of(error)}).") from error

    def random_state(self, folder: Path, state: dict[str, Any]) -> RandomState:
        """This process's random state. A rank that did not exist when the run was saved keeps the state that it was started with."""
        if wrong := misfit(state.get(RANDOM_OF_RANKS, []), [RANDOM_STATE], RANDOM_OF_RANKS):
            raise DamagedCheckpoint.of(folder, f"{wrong}.")
        of_ranks = [state["random"], *state.get(RANDOM_OF_RANKS, [])]
        if self.rank >= len(of_ranks):
            return get_random_state()
        name = Path(rank_file("random", self.rank, len(of_ranks))).stem
        torch_states = self.shards.read(folder, name, state["contents"]["tensors"].get(name))
        try:
            return require_usable(RandomState(torch_states, **of_ranks[self.rank]))
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError) as error:
            raise DamagedCheckpoint.of(folder, f"its {name} is not a state of the generators ({error}).") from error

    def require_intact(self, folder: Path) -> None:
        require_intact(folder)

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest intact checkpoint, and an error message for each newer one.

        Raises:
            CheckpointError: there are checkpoints, and none is intact; or the newest is intact and cannot be read by this version.
        """
        return self.first_intact(self.load)

    def first_intact(self, use: Callable[[int], Result]) -> tuple[Result | None, list[str]]:
        """The result of use(step) for the newest checkpoint with which it does not raise DamagedCheckpoint, None if there are no
        checkpoints; and an error message for each newer one."""
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
        """The steps from which a run may resume, ascending, and a message for each of the others."""
        return self.steps(), []

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; several ranks agree whether it failed (chapter 06)."""
        return call()

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint, without checking the rest."""
        return json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))["notes"]

    def best(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss; None if none was evaluated."""
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
        for leftover in (path for ending in LEFTOVERS for path in self.folder.glob(f"*{ending}")):
            shutil.rmtree(leftover, ignore_errors=True)


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """Read and validate `state.json`."""
    try:
        problem = problem_of(state := json.loads((folder / STATE).read_text(encoding="utf-8")), step)
    except (ValueError, RecursionError):
        problem = f"its {STATE} is not JSON"
    except CheckpointError as error:
        raise CheckpointError(f"{folder} {error}") from None
    if problem:
        raise DamagedCheckpoint.of(folder, f"{problem}.")
    return state


def whole_files(snapshot: Snapshot) -> dict[str, Shards]:
    """The files of a single process: full tensors."""
    optimizer = {f"{key}/{name}": tensor for name, tensors in snapshot.optimizer.tensors.items() for key, tensor in tensors.items()}
    sets = {"weights": snapshot.weights, "optimizer": optimizer, "random": snapshot.random.torch}
    return {rank_file(name, 0, 1): whole_shards(tensors) for name, tensors in sets.items()}


def state_text(snapshot: Snapshot, notes: dict[str, Any], tensors: dict[str, Described], others: Sequence[dict[str, Any]] = ()) -> str:
    """The content of `state.json`: everything of a snapshot but its tensors, and a table of contents.

    Args:
        tensors: the tensors of each set.
        others: the random states of the other ranks, as `plain_random` gives them.
    """
    return json.dumps({
        "format": FORMAT,
        "step": snapshot.step,
        "notes": notes,
        "parts": snapshot.parts,
        "optimizer": {"values": snapshot.optimizer.values, "groups": snapshot.optimizer.groups},
        "random": plain_random(snapshot),
        "contents": {"parts": list(snapshot.parts), "tensors": tensors},
        RANDOM_OF_RANKS: list(others),
    })  # fmt: skip


def plain_random(snapshot: Snapshot) -> dict[str, Any]:
    """The random state without torch's, whose states are tensors."""
    return {"python": snapshot.random.python, "numpy": snapshot.random.numpy}


def complete(folder: Path, files: Mapping[str, Any], state: str) -> None:
    """Add the state and the manifest to a folder that holds the tensors' files, given with their fingerprints."""
    (folder / STATE).write_text(state, encoding="utf-8")
    manifest = {**files, STATE: fingerprint(folder / STATE)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def reason_of(error: Exception) -> str:
    """The operating system's error message, without its number."""
    return system_reason(error) or str(error)


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
