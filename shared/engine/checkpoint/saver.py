"""Chapter 04. The checkpointer: asynchronous checkpoints, written while training continues, and the search for the newest intact one.

The next step changes the weights in place, so what a thread writes must be a copy. Copying memory is fast and happens between two
steps; writing, hashing and forcing onto the disk is slow and happens on the thread.

Left out on purpose: more than one save at a time. A second one waits for the first, so memory holds one copy at most.
"""

import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shared.course.errors import CourseError
from shared.engine.checkpoint.files import Shards, contents_of
from shared.engine.checkpoint.folder import Checkpoints, state_text, whole_files
from shared.engine.checkpoint.optimizer_state import require_same_settings, require_settings, retuned
from shared.engine.checkpoint.snapshot import Snapshot, Stateful, restore, take_snapshot, weights_of
from shared.engine.checkpoint.soundness import CheckpointError, DamagedCheckpoint

CALLBACK = "callback."  # how a callback's name begins among the parts of a checkpoint


class Saver:
    """The checkpointer: saves a run, asynchronously if asked to, and restores it.

    What touches the model happens in the calling thread; the thread writes plain copies.

    Args:
        state: what is saved: a module whose `state_dict` holds the weights, and over whose `named_parameters` the optimizer was built.
        checkpoints: where to.
        asynchronous: whether `save` returns before the checkpoint is complete.

    Attributes:
        retuned: sentences about what the run took from its own settings, and not from the checkpoint.
    """

    def __init__(self, state: nn.Module, checkpoints: Checkpoints, asynchronous: bool):
        self.retuned: list[str] = []
        self.state, self.checkpoints, self.asynchronous = state, checkpoints, asynchronous
        self.thread: ThreadPoolExecutor | None = None
        self.pending: Future[Any] | None = None

    def begin(self) -> str | None:
        """Prepare for the run, before anything is restored. Returns a message about where checkpoints will be, if that needs one."""
        return None

    def save(self, step: int, optimizer: Optimizer, parts: Mapping[str, Stateful], notes: dict[str, Any]) -> None:
        """Start to save the run after `step` steps. Call `finished(wait=True)` first: it returns the earlier save, or raises its error."""
        if self.pending is not None:
            raise RuntimeError("A save is under way: call finished(wait=True) before the next.")
        write = self.writing(take_snapshot(step, self.state, optimizer, parts), notes)
        if self.asynchronous:
            self.thread = self.thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self.pending = self.thread.submit(write)
            return
        self.pending = Future()
        try:
            self.pending.set_result(write())
        except Exception as error:
            self.pending.set_exception(error)

    def writing(self, snapshot: Snapshot, notes: dict[str, Any]) -> Callable[[], Any]:
        """The function that writes the snapshot, perhaps on the thread: of copies, where the next step would change the originals."""
        files = whole_files(snapshot)
        state = state_text(snapshot, notes, contents_of(files))
        return partial(self.checkpoints.write, snapshot.step, copied(files) if self.asynchronous else files, state)

    def finished(self, wait: bool = False) -> Path | None:
        """The checkpoint that was completed since the last call, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.pending is None or not (wait or self.pending.done()):
            return None
        pending, self.pending = self.pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for a save in progress. Saving again is possible."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)
            self.thread = None

    def is_best(self, loss: float) -> bool:
        """Whether a validation loss is below that of every checkpoint. Only while no save is under way."""
        best = self.checkpoints.best()
        return math.isfinite(loss) and (best is None or loss < best[1])

    def restore(
        self, optimizer: Optimizer, parts: Mapping[str, Stateful], retune: Collection[str] = ()
    ) -> tuple[int | None, list[str]]:
        """Resume from the newest intact checkpoint. Returns its step, or None, and an error message for each damaged one.

        From the checkpoint: weights, the optimizer's state and settings, the position in the data, random numbers, the state of callbacks
        that both have. The optimizer's settings and the weights' dtypes must be what was saved. This run's own: schedule, batch size,
        number of steps, engine configuration, layout, and what `retune` names (`RuntimeEngine.fit`).

        A checkpoint whose parts cannot take their state is damaged where an older one's can; where none can, their code is wrong.

        Raises:
            CourseError: `retune` names what the optimizer has no setting for.
            CheckpointError: no checkpoint is intact, or the newest that is does not fit this run.
        """
        parts, failures = {name: Part(name, part, name in retune) for name, part in parts.items()}, []
        require_settings(optimizer, retune)

        def use(step: int) -> int:
            try:
                return self.restore_step(step, optimizer, parts, retune)
            except PartFailed as failed:
                failures.append(failed.__cause__)
                raise DamagedCheckpoint.of(self.checkpoints.path(step), f"{failed}.") from failed

        try:
            return self.checkpoints.first_intact(lambda step: self.checkpoints.agreed(partial(use, step)))
        except CheckpointError:
            if failures:
                raise failures[0] from None
            raise

    def restore_step(self, step: int, optimizer: Optimizer, parts: Mapping[str, "Part"], retune: Collection[str]) -> int:
        snapshot, said = self.checkpoints.load(step), []
        mine, snapshot = shared_callbacks(parts, snapshot)
        try:
            require_same_dtypes(self.state, snapshot)
            if shapes_of(weights_of(self.state)) == shapes_of(snapshot.weights):  # of another model, `restore` says more
                if retune:
                    state, said = retuned(self.state, optimizer, snapshot.optimizer, retune)
                    snapshot = replace(snapshot, optimizer=state)
                require_same_settings(self.state, optimizer, snapshot.optimizer)
            step = restore(snapshot, self.state, optimizer, mine)
            self.retuned = [*said, *(part.said for part in parts.values() if part.said)]
            return step
        except ValueError as error:
            raise CheckpointError(f"{self.checkpoints.path(step)} does not fit this run. {error}") from error


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def remember_rates(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, with the learning rate that it was given kept as `initial_lr` in each group, as PyTorch's schedules do."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def require_same_dtypes(model: nn.Module, snapshot: Snapshot) -> None:
    """Refuse weights of another dtype: casting them would lose digits, or keep a precision that they do not have."""
    for name, weight in weights_of(model).items():
        saved = snapshot.weights.get(name, weight)
        if saved.dtype != weight.dtype:
            raise ValueError(
                f"The weight {name} is {str(weight.dtype)[6:]} here and {str(saved.dtype)[6:]} in the saved run: resume in that dtype, or "
                "begin a new run in another output folder."
            )


class PartFailed(Exception):
    """A part of the run failed to load its state from a checkpoint; the cause says why."""


class Part:
    """A part of a run. If it cannot take its state it raises `PartFailed`, which is not one of `restore`'s refusals. renewed: where it
    refuses the state in a sentence, it stays at its beginning, and `said` has a sentence about that."""

    def __init__(self, name: str, part: Stateful, renewed: bool = False):
        self.name, self.part, self.renewed, self.said = name, part, renewed, ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.said = ""
        try:
            self.part.load_state_dict(state)
        except CourseError:
            if not self.renewed:
                raise
            self.said = f"The {self.name} begins at its start: its data is not that of the checkpoint."
        except Exception as error:
            raise PartFailed(f"its state of {self.name} cannot be taken ({type(error).__name__}: {error})") from error


def shared_callbacks(parts: Mapping[str, Stateful], snapshot: Snapshot) -> tuple[dict[str, Stateful], Snapshot]:
    """Both without the callbacks that only one of them has: a run may resume with another tracker, which starts without state."""
    odd = {name for name in parts.keys() ^ snapshot.parts.keys() if name.startswith(CALLBACK)}
    kept = {name: state for name, state in snapshot.parts.items() if name not in odd}
    return {name: part for name, part in parts.items() if name not in odd}, replace(snapshot, parts=kept)


def copied(files: Mapping[str, Shards]) -> dict[str, Shards]:
    """Copies of the tensors in CPU memory, which the next step does not change."""
    return {file: {at: tensor.to("cpu", copy=True) for at, tensor in shards.items()} for file, shards in files.items()}
