"""Chapter 06. The distributed checkpointer: each rank writes its shards, and rank 0 commits the folder.

    all     write their shards into `step-XXXXXXXX.ranks`, on a thread, while training continues
    all     agree, between two later steps, that every rank has written
    rank 0  moves the files into place, with a manifest of all checksums, by one atomic rename

Ranks communicate between steps only, never from the thread. If a rank cannot write, all ranks raise the same error. A save that is under
way when a rank dies is discarded, and the checkpoint before it remains.

Left out on purpose: machines without a shared file system.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from shared.engine.checkpoint.atomic import atomic_save, force_to_disk
from shared.course.errors import CourseError
from shared.engine.checkpoint.folder import MANIFEST, STATE, Checkpoints, fingerprint, reason_of, require_intact, state_of
from shared.engine.checkpoint.random_state import RandomState, get_random_state
from shared.engine.checkpoint.saver import Saver
from shared.engine.checkpoint.snapshot import Snapshot, Stateful
from shared.engine.checkpoint.soundness import RANDOM_STATE, CheckpointError, DamagedCheckpoint, Described, misfit
from shared.parallel.checkpoint.files import ShardFiles, rank_file, write_shards
from shared.parallel.sharding import Region, whole_region

if TYPE_CHECKING:
    from shared.parallel.strategy import ParallelStrategy

RANDOM = "random_of_ranks"  # in state.json: what Python and NumPy draw from, by rank
Result = TypeVar("Result")
Shards = dict[tuple[str, Region], Tensor]


class RankCheckpoints(Checkpoints):
    """Chapter 04's checkpoints as one rank of many reads them: its shards of the tensors, and its share of the checksums.

    Every rank makes the same calls at the same time, and gets the same answers.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, strategy: "ParallelStrategy"):
        elsewhere = {*strategy.holders.shapes, *strategy.optim_holders.shapes}
        storage = ShardFiles(strategy.weight_regions, strategy.optim_regions, elsewhere)
        super().__init__(folder, keep_last, keep_best, storage)
        self.strategy, self.world = strategy, strategy.mesh.world

    def load(self, step: int) -> Snapshot:
        """The snapshot with this rank's numbers, and of the optimizer's groups and values those that it has parameters of."""
        snapshot = self.agreed(partial(super().load, step))
        held, everywhere = self.strategy.optim_regions, self.strategy.optim_holders.shapes
        values = {name: of_name for name, of_name in snapshot.optimizer.values.items() if name not in held or held[name].numel}
        groups = [
            group | {"names": [name for name in group["names"] if name in held or name not in everywhere]}
            for group in snapshot.optimizer.groups
        ]
        values = {name: of_name for name, of_name in values.items() if name in held or name not in everywhere}
        return replace(snapshot, optimizer=replace(snapshot.optimizer, values=values, groups=groups))

    def require_intact(self, folder: Path) -> None:
        """Verify checksums on all ranks, before any rank reads a file that may be damaged."""
        self.agreed(partial(require_intact, folder, slice(self.world.rank, None, self.world.size)))

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; if it fails on any rank, raise the first such error on all ranks. Damage comes before all else: what
        is damaged fits no run."""
        result, problem = None, None
        try:
            result = call()
        except CourseError as error:
            problem = [str(error), isinstance(error, DamagedCheckpoint)]
        if problems := [each for each in self.world.gather_objects(problem) if each]:
            sentence, is_damage = max(problems, key=lambda each: each[1])
            raise (DamagedCheckpoint if is_damage else CheckpointError)(sentence)
        return result

    def random_state(self, folder: Path, state: dict[str, Any]) -> RandomState:
        """This rank's random state. A rank that did not exist when the run was saved keeps the state that it was started with."""
        if wrong := misfit(state.get(RANDOM, []), [RANDOM_STATE], RANDOM):
            raise DamagedCheckpoint.of(folder, f"{wrong}.")
        of_ranks = [state["random"], *state.get(RANDOM, [])]
        if self.world.rank >= len(of_ranks):
            return get_random_state()
        name = Path(rank_file("random", self.world.rank, len(of_ranks))).stem
        return self.usable(folder, name, state, of_ranks[self.world.rank])


class RankSaver(Saver):
    """One rank's end of the distributed checkpointer. Every rank makes the same calls at the same time.

    Args:
        strategy: what is saved.
        folder: holds the checkpoints; every rank sees the same.
        asynchronous: whether `save` returns before this rank's files are written.

    Raises:
        ValueError: the ranks together do not hold the whole of every tensor.
    """

    def __init__(
        self, strategy: "ParallelStrategy", folder: Path, keep_last: int = 2, keep_best: bool = True, asynchronous: bool = True
    ):
        super().__init__(strategy.state, RankCheckpoints(folder, keep_last, keep_best, strategy), asynchronous)
        strategy.holders.require_complete()
        strategy.optim_holders.require_complete()
        self.strategy, self.world = strategy, strategy.mesh.world
        self.device = next(strategy.module.parameters()).device  # where small tensors travel from
        self.step, self.common = 0, ""

    def writing(self, snapshot: Snapshot, notes: dict[str, Any]) -> Callable[[], Any]:
        self.step, staging = snapshot.step, self.checkpoints.path(snapshot.step).with_suffix(".ranks")
        files = self.own_files(snapshot)
        self.common = self.common_state(snapshot, notes, files)
        problem = self.world.gather_objects(empty_folder(staging) if self.world.rank == 0 else None)[0]
        if self.asynchronous:
            files = {file: {at: tensor.to("cpu", copy=True) for at, tensor in shards.items()} for file, shards in files.items()}
        return partial(write_files, staging, files, problem)

    def own_files(self, snapshot: Snapshot) -> dict[str, Shards]:
        """The shards that this rank writes, by file: each shard is written by one rank only."""
        strategy, rank = self.strategy, self.world.rank
        weights: Shards = {}
        writers = strategy.holders.writers
        for name, tensor in snapshot.weights.items():
            part = name, strategy.weight_regions[name]
            if writers.get(part) == rank:
                weights[part] = tensor.detach()
        optimizer: Shards = {}
        writers = strategy.optim_holders.writers
        for name, tensors in snapshot.optimizer.tensors.items():
            region = strategy.optim_regions[name]
            if writers.get((name, region)) != rank:  # the step counter of a parameter of which this rank owns no elements may be stale
                continue
            for key, tensor in tensors.items():
                is_sharded = tensor.numel() == region.numel and tensor.dim() > 0
                optimizer[f"{key}/{name}", region if is_sharded else whole_region(tensor.shape)] = tensor.detach()
        random = {(name, whole_region(state.shape)): state for name, state in snapshot.random.torch.items()}
        files = {"weights": weights, "optimizer": optimizer, "random": random}
        return {rank_file(file, rank, self.world.size): shards for file, shards in files.items()}

    def common_state(self, snapshot: Snapshot, notes: dict[str, Any], files: Mapping[str, Shards]) -> str:
        """The text of `state.json`: what is the same on all ranks from rank 0, what differs from those that have it. files: as `own_files`
        gives them."""
        held = self.strategy.optim_regions
        values = {name: of_name for name, of_name in snapshot.optimizer.values.items() if held[name].numel}
        random = {key: value for key, value in asdict(snapshot.random).items() if key != "torch"}
        own = [values, random, [group["names"] for group in snapshot.optimizer.groups], contents_of(files)]
        everyone = self.world.gather_objects(own)
        merged = {name: of_name for values, *_ in reversed(everyone) for name, of_name in values.items()}
        groups = []
        for number, group in enumerate(snapshot.optimizer.groups):
            names = dict.fromkeys(name for _, _, of_groups, _ in everyone for name in of_groups[number])
            groups.append(group | {"names": list(names)})
        contents: dict[str, Described] = {}
        for *_, of_rank in everyone:
            for name, tensors in of_rank.items():
                contents.setdefault(name, {}).update(tensors)
        snapshot = replace(snapshot, optimizer=replace(snapshot.optimizer, values=merged, groups=groups))
        return json.dumps(state_of(snapshot, notes, contents) | {RANDOM: [random for _, random, *_ in everyone[1:]]})

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
        """Finish writing this rank's files. Only a single rank completes its save: with several, others may be gone."""
        super().close()
        if self.world.size == 1:
            with suppress(CheckpointError):  # the error that ends the run says more
                self.finished()

    def complete(self, files: dict[str, dict[str, Any]]) -> list[str]:
        """Put the ranks' files into a folder with state and manifest, atomically. Returns error messages."""
        target = self.checkpoints.path(self.step)
        staging = target.with_suffix(".ranks")

        def write(folder: Path) -> None:
            for name in files:
                (staging / name).rename(folder / name)
            (folder / STATE).write_text(self.common, encoding="utf-8")
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
        """Whether a loss is the best so far, decided by rank 0."""
        return self.world.gather_objects(super().is_best(loss))[0]

    def restore(self, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> tuple[int | None, list[str]]:
        """Resume from the newest intact checkpoint, whichever layout wrote it."""
        seen = self.world.gather_objects(self.checkpoints.steps())
        if differing := [rank for rank, steps in enumerate(seen) if steps != seen[0]]:
            raise CheckpointError(
                f"Rank {differing[0]} sees the checkpoints of steps {seen[differing[0]]} in {self.checkpoints.folder}, and rank 0 those of "
                f"{seen[0]}: all ranks need the same folder, on storage that all machines share."
            )
        return super().restore(optimizer, parts)


def contents_of(files: Mapping[str, Shards]) -> dict[str, Described]:
    """This rank's share of the table of contents: by set of tensors, dtype and shape of the whole of each of which it writes a shard. Its
    random state is a set of its own."""
    found: dict[str, Described] = {}
    for file, shards in files.items():
        name = Path(file).stem
        tensors = found.setdefault(name if name.startswith("random") else name.split("-")[0], {})
        for (entry, region), tensor in shards.items():
            tensors[entry] = [str(tensor.dtype).removeprefix("torch."), list(region.shape)]
    return found


def empty_folder(path: Path) -> str | None:
    """Make a folder for the ranks' files, and remove the leftovers of discarded saves. Returns an error message."""
    try:
        for leftover in path.parent.glob("*.ranks"):
            shutil.rmtree(leftover)
        path.mkdir(parents=True)
    except OSError as error:
        return reason_of(error)
    return None


def write_files(folder: Path, files: dict[str, Shards], problem: str | None) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Write this rank's files. Returns each file's fingerprint (checksum), and an error message."""
    try:
        if problem is None:
            for name, shards in files.items():
                write_shards(folder / name, shards)
                force_to_disk(folder / name)
        return {name: fingerprint(folder / name) for name in files} if problem is None else {}, problem
    except (OSError, SafetensorError) as error:
        return {}, reason_of(error)
