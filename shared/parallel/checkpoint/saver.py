"""Chapter 06. Saving and restoring a run of many ranks: each writes what it holds, one of them makes the folder complete.

    all     agree who writes which numbers; write them into `step-XXXXXXXX.ranks`, on a thread, while training goes on
    all     later, between two steps: has everybody written?
    rank 0  moves the files into place, with the manifest of everybody's checksums, by one renaming

Ranks speak with each other between steps only, never from the thread. So a rank that cannot write is heard of by all, and all fail with
the same sentence; a save that is under way when a rank dies is given up, and the checkpoint before it stands.

Left out on purpose: machines without a folder that all of them see.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.engine.checkpoint.atomic import atomic_save, force_to_disk
from shared.engine.checkpoint.folder import MANIFEST, STATE, CheckpointError, Checkpoints, fingerprint, reason_of, require_intact, state_of
from shared.engine.checkpoint.random_state import RandomState, get_random_state
from shared.engine.checkpoint.snapshot import Snapshot, Stateful, take_snapshot
from shared.engine.checkpoint.saver import Saver
from shared.parallel.parallelize import Parallel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.checkpoint.local_state import LocalState
from shared.parallel.checkpoint.files import Place, RankFiles, rank_file, write_parts

RANDOM = "random_of_ranks"  # in state.json: what Python and NumPy draw from, by rank
Result = TypeVar("Result")
Placed = dict[tuple[str, Place], Tensor]


class RankCheckpoints(Checkpoints):
    """Chapter 04's checkpoints as one rank of many reads them: its part of the tensors, and its share of the checksums.

    Every rank makes the same calls at the same time, and is told the same.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, local: LocalState, world: Communicator):
        super().__init__(folder, keep_last, keep_best)
        self.local, self.world = local, world

    def load(self, step: int) -> Snapshot:
        self.storage = RankFiles(self.local.weight_places(), self.local.state_places())
        snapshot = self.agreed(partial(super().load, step))
        places = self.local.state_places()
        values = {name: held for name, held in snapshot.optimizer.values.items() if places[name].start < places[name].stop}
        return replace(snapshot, optimizer=replace(snapshot.optimizer, values=values), random=self.random_state(step))

    def require_intact(self, folder: Path) -> None:
        """Agreed upon before anybody reads what may be damaged."""
        self.agreed(partial(require_intact, folder, slice(self.world.rank, None, self.world.size)))

    def agreed(self, call: Callable[[], Result]) -> Result:
        """What `call` returns, or on all ranks the error of the first on which it fails."""
        result, problem = None, None
        try:
            result = call()
        except CheckpointError as error:
            problem = str(error)
        if problems := [each for each in self.world.gather_objects(problem) if each]:
            raise CheckpointError(problems[0])
        return result

    def random_state(self, step: int) -> RandomState:
        """This rank's own. One that was not there when the run was saved goes on with the stream that it was started with."""
        state = json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))
        of_ranks = [state["random"], *state.get(RANDOM, [])]
        if self.world.rank >= len(of_ranks):
            return get_random_state()
        name = Path(rank_file("random", self.world.rank, len(of_ranks))).stem
        return RandomState(self.storage.read(self.path(step), name), **of_ranks[self.world.rank])


class RankSaver(Saver):
    """One rank's end of saving. Every rank makes the same calls at the same time.

    Args:
        folder: holds the checkpoints; every rank sees the same.
        asynchronous: whether `save` returns before this rank's files are written.
        parallel: what is saved.
        world: all ranks.
        device: where small tensors travel from.
    """

    def __init__(
        self,
        folder: Path,
        parallel: Parallel,
        world: Communicator,
        device: torch.device,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        asynchronous: bool = True,
    ):
        self.local, self.world, self.device = LocalState(parallel), world, device
        super().__init__(RankCheckpoints(folder, keep_last, keep_best, self.local, world), asynchronous)
        self.step, self.state = 0, ""

    def snapshot(self, step: int, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> Snapshot:
        return take_snapshot(step, self.local, optimizer, parts)

    def save(self, snapshot: Snapshot, notes: dict[str, Any]) -> None:
        if self.pending is not None:
            raise RuntimeError("A save is under way: call finished(wait=True) before the next.")
        self.step, staging = snapshot.step, self.checkpoints.path(snapshot.step).with_suffix(".ranks")
        files = self.own_files(snapshot)
        self.state = self.common_state(snapshot, notes)
        problem = self.world.gather_objects(empty_folder(staging) if self.world.rank == 0 else None)[0]
        if self.asynchronous:
            files = {file: {at: tensor.to("cpu", copy=True) for at, tensor in placed.items()} for file, placed in files.items()}
        work = partial(write_files, staging, files, problem)
        if self.asynchronous:
            self.thread = self.thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self.pending = self.thread.submit(work)
            return
        self.pending = Future()
        self.pending.set_result(work())

    def own_files(self, snapshot: Snapshot) -> dict[str, Placed]:
        """What this rank writes: by file, the numbers that no other rank writes."""
        held = {"weights": self.local.placed_weights(), "optimizer": self.local.placed_state(snapshot.optimizer)}
        mine = [(file, *placed) for file, tensors in held.items() for placed in tensors]
        everyone = self.world.gather_objects([[file, name, place.shape, place.start, place.stop] for file, name, place in mine])
        chosen = set(shared_out([[tuple(item[:2]) + (tuple(item[3:]),) for item in items] for items in everyone])[self.world.rank])
        files: dict[str, Placed] = {"weights": {}, "optimizer": {}}
        for file, name, place in mine:
            if (file, name, (place.start, place.stop)) in chosen:
                files[file][name, place] = held[file][name, place].detach()
        files["random"] = {(name, Place(tuple(state.shape), 0, len(state))): state for name, state in snapshot.random.torch.items()}
        return {rank_file(file, self.world.rank, self.world.size): placed for file, placed in files.items()}

    def common_state(self, snapshot: Snapshot, notes: dict[str, Any]) -> str:
        """The text of `state.json`: what is the same on all ranks from rank 0, what differs from those that have it."""
        places = self.local.state_places()
        values = {name: held for name, held in snapshot.optimizer.values.items() if places[name].start < places[name].stop}
        random = {key: value for key, value in asdict(snapshot.random).items() if key != "torch"}
        everyone = self.world.gather_objects([values, random])
        merged = {name: held for values, _ in reversed(everyone) for name, held in values.items()}
        snapshot = replace(snapshot, optimizer=replace(snapshot.optimizer, values=merged))
        return json.dumps(state_of(snapshot, notes) | {RANDOM: [random for _, random in everyone[1:]]})

    def finished(self, wait: bool = False) -> Path | None:
        """The checkpoint that was completed since the last call, if any. Every rank calls it between two steps."""
        if self.pending is None:
            return None
        if wait:
            self.pending.exception()
        under_way = torch.tensor([float(not self.pending.done())], device=self.device)
        self.world.all_reduce(under_way, op="max")
        if under_way:
            return None
        pending, self.pending = self.pending, None
        files, problem = pending.result()
        answers = self.world.gather_objects([files, problem])
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]
        if self.world.rank == 0:
            problems = problems or self.complete({name: entry for files, _ in answers for name, entry in files.items()})
        if problems := self.world.gather_objects(problems)[0]:
            raise self.checkpoints.unwritten(self.step, problems[0])
        return self.checkpoints.path(self.step)

    def close(self) -> None:
        """Let this rank's files be written. A save under way is made complete where this rank is alone: others may not come any more."""
        super().close()
        if self.world.size == 1:
            with suppress(CheckpointError):  # the error that ends the run says more
                self.finished()

    def complete(self, files: dict[str, dict[str, Any]]) -> list[str]:
        """Put the ranks' files into a folder with state and manifest, whole or not at all. Returns what went wrong."""
        target = self.checkpoints.path(self.step)
        staging = target.with_suffix(".ranks")

        def write(folder: Path) -> None:
            for name in files:
                (staging / name).rename(folder / name)
            (folder / STATE).write_text(self.state, encoding="utf-8")
            manifest = files | {STATE: fingerprint(folder / STATE)}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

        try:
            atomic_save(target, write)
            self.checkpoints.remove_old(self.step)
            shutil.rmtree(staging)
        except OSError as error:
            return [f"rank 0: {reason_of(error)}"]
        return []

    def is_best(self, loss: float) -> bool:
        """As rank 0 sees the folder."""
        return self.world.gather_objects(super().is_best(loss))[0]

    def restore(self, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> tuple[int | None, list[str]]:
        """Go on from the newest intact checkpoint, whichever layout wrote it."""
        seen = self.world.gather_objects(self.checkpoints.steps())
        if differing := [rank for rank, steps in enumerate(seen) if steps != seen[0]]:
            raise CheckpointError(
                f"Rank {differing[0]} sees the checkpoints of steps {seen[differing[0]]} in {self.checkpoints.folder}, and rank 0 those of "
                f"{seen[0]}: all ranks need the same folder, on storage that all machines share."
            )
        return super().restore(self.local, optimizer, parts)


def shared_out(held: Sequence[Sequence[tuple]]) -> list[list[tuple]]:
    """Who writes what: each of the numbers that several ranks hold goes to the one that has the fewest to write so far.

    Args:
        held: for each rank its items (file, name, (start, stop)).
    """
    holders: dict[tuple, list[int]] = {}
    for rank, items in enumerate(held):
        for item in items:
            holders.setdefault(item, []).append(rank)
    written: list[list[tuple]] = [[] for _ in held]
    load = [0] * len(held)
    for item in sorted(holders, key=lambda item: (len(holders[item]) > 1, item[2][0] - item[2][1], item)):
        rank = min(holders[item], key=lambda rank: load[rank])
        written[rank].append(item)
        load[rank] += item[2][1] - item[2][0]
    return written


def empty_folder(path: Path) -> str | None:
    """Make a folder for the ranks' files, and remove what lies there of saves that were given up. Returns what went wrong."""
    try:
        for leftover in path.parent.glob("*.ranks"):
            shutil.rmtree(leftover)
        path.mkdir(parents=True)
    except OSError as error:
        return reason_of(error)
    return None


def write_files(folder: Path, files: dict[str, Placed], problem: str | None) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Returns each file's fingerprint, and what went wrong."""
    try:
        if problem is None:
            for name, placed in files.items():
                write_parts(folder / name, placed)
                force_to_disk(folder / name)
        return {name: fingerprint(folder / name) for name in files} if problem is None else {}, problem
    except (OSError, SafetensorError) as error:
        return {}, reason_of(error)
