"""Chapter 06. The distributed checkpointer: each rank writes its shards, and rank 0 commits the folder.

    all     write their shards into `step-XXXXXXXX.ranks`, on a thread, while training continues
    all     agree, between two later steps, that every rank has written
    rank 0  moves the files into place, with a manifest of all checksums, by one atomic rename

Ranks communicate between steps only, never from the thread. If a rank cannot write, all ranks raise the same error. A save that is under
way when a rank dies is discarded, and the checkpoint before it remains.

Without a shared folder every machine keeps a whole checkpoint of its own, where its ranks hold all (`RankSaver.begin`): the first rank of
each machine does there what rank 0 does above. A run is resumed from the newest step that all machines have.
"""

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shared.engine.checkpoint.atomic import atomic_save, force_to_disk
from shared.engine.checkpoint.folder import MANIFEST, STATE, fingerprint, reason_of, state_of
from shared.engine.checkpoint.saver import Saver
from shared.engine.checkpoint.snapshot import Snapshot
from shared.engine.checkpoint.soundness import CheckpointError, Described, table_entry
from shared.model.sharding import Region, whole_region
from shared.parallel.checkpoint.files import rank_file, write_shards
from shared.parallel.checkpoint.folder import RANDOM, RankCheckpoints
from shared.parallel.health.agreement import rank_names, ranks_that_share
from shared.parallel.health.replicas import require_equal_state
from shared.parallel.held import Held

Shards = dict[tuple[str, Region], Tensor]


class RankSaver(Saver):
    """One rank's end of the distributed checkpointer. Every rank makes the same calls at the same time.

    Args:
        held: what is saved.
        folder: holds the checkpoints; the same for all ranks, or one for each machine.
        asynchronous: whether `save` returns before this rank's files are written.

    Raises:
        ValueError: the ranks together do not hold the whole of every tensor.
    """

    def __init__(
        self, held: Held, folder: Path, keep_last: int = 2, keep_best: bool = True, asynchronous: bool = True
    ):
        super().__init__(held.state, RankCheckpoints(folder, keep_last, keep_best, held), asynchronous)
        held.holders.require_complete()
        held.optim_holders.require_complete()
        self.held, self.world = held, held.mesh.world
        self.device = next(held.module.parameters()).device  # where small tensors travel from
        self.step, self.common = 0, ""

    @property
    def leads(self) -> bool:
        """Whether this rank completes what the ranks that share its folder write."""
        return self.checkpoints.sharing[0] == self.world.rank

    def begin(self) -> str | None:
        """Find out which ranks see the same folder. Every rank calls it, before the first step. Returns a sentence where not all do.

        Raises:
            CheckpointError: the folder is not shared, and the ranks of a machine do not hold the whole.
        """
        self.checkpoints.sharing = ranks_that_share(self.world, self.checkpoints.folder.parent)
        everyone = self.world.gather_objects([self.checkpoints.sharing, platform.node()])
        if self.checkpoints.shared:
            return None
        hosts, machines = [host for _, host in everyone], {tuple(sharing) for sharing, _ in everyone}
        names = " and ".join(rank_names(ranks, hosts) for ranks in sorted(machines))
        told = f"{self.checkpoints.folder.parent} is not one folder for all ranks: {names}"
        tables = self.held.holders, self.held.optim_holders
        if not all(table.complete_among(ranks) for table in tables for ranks in machines):
            raise CheckpointError(
                f"{told} each see their own, and no machine holds the whole model with its optimizer, so none could keep a checkpoint. Put "
                f"engine.output on storage that all machines share, or give each machine a replica: parallel.data_parallel={len(machines)} "
                f"parallel.fully_sharded={self.world.size // len(machines)} parallel.zero=0."
            )
        return f"{told} each keep a whole checkpoint in their own. A run is resumed from the newest step that all of them have."

    def writing(self, snapshot: Snapshot, notes: dict[str, Any]) -> Callable[[], Any]:
        require_equal_state(self.held, snapshot, notes)
        self.step, staging = snapshot.step, self.checkpoints.path(snapshot.step).with_suffix(".ranks")
        files = self.own_files(snapshot)
        self.common = self.common_state(snapshot, notes, files)
        problem = next(filter(None, self.world.gather_objects(empty_folder(staging) if self.leads else None)), None)
        if self.asynchronous:
            files = {file: {at: tensor.to("cpu", copy=True) for at, tensor in shards.items()} for file, shards in files.items()}
        return partial(write_files, staging, files, problem)

    def own_files(self, snapshot: Snapshot) -> dict[str, Shards]:
        """The shards that this rank writes, by file: each shard is written by one rank only of those that share the folder."""
        held, rank = self.held, self.world.rank
        weights: Shards = {}
        writers = held.holders.writers(self.checkpoints.sharing)
        for name, tensor in snapshot.weights.items():
            part = name, held.weight_regions[name]
            if writers.get(part) == rank:
                weights[part] = tensor.detach()
        optimizer: Shards = {}
        writers = held.optim_holders.writers(self.checkpoints.sharing)
        for name, tensors in snapshot.optimizer.tensors.items():
            region = held.optim_regions[name]
            if writers.get((name, region)) != rank:  # the step counter of a parameter of which this rank owns no elements may be stale
                continue
            for key, tensor in tensors.items():
                is_sharded = tensor.numel() == region.numel and tensor.dim() > 0
                optimizer[f"{key}/{name}", region if is_sharded else whole_region(tensor.shape)] = tensor.detach()
        files = {("weights", rank): weights, ("optimizer", rank): optimizer}
        for of_rank, states in self.random_states(snapshot).items():
            files["random", of_rank] = {(name, whole_region(state.shape)): state for name, state in states.items()}
        return {rank_file(name, of_rank, self.world.size): shards for (name, of_rank), shards in files.items()}

    def random_states(self, snapshot: Snapshot) -> dict[int, dict[str, Tensor]]:
        """Rank -> state of its torch generators, for the ranks whose state it writes: itself; or all, on one rank of each machine."""
        if self.checkpoints.shared:
            return {self.world.rank: snapshot.random.torch}
        everyone = self.world.gather_objects({name: state.tolist() for name, state in snapshot.random.torch.items()})
        tensors = [{name: torch.tensor(state, dtype=torch.uint8) for name, state in states.items()} for states in everyone]
        return dict(enumerate(tensors)) if self.leads else {}

    def common_state(self, snapshot: Snapshot, notes: dict[str, Any], files: Mapping[str, Shards]) -> str:
        """The text of `state.json`: what all ranks have in common from rank 0, the rest from each rank. files: as `own_files`
        gives them."""
        held = self.held.optim_regions
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
        text = json.dumps(state_of(snapshot, notes, contents) | {RANDOM: [random for _, random, *_ in everyone[1:]]})
        return text if self.checkpoints.shared else self.world.gather_objects(text)[0]

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
        written = {name: entry for rank in self.checkpoints.sharing for name, entry in answers[rank][0].items()}
        # Older checkpoints are removed when all machines have this one.
        for stage in (partial(self.complete, written), partial(self.checkpoints.remove_old, self.step)):
            reason = problem_of(stage) if self.leads and not problems else None
            reasons = enumerate(self.world.gather_objects(reason))
            problems = problems or [f"rank {rank}: {reason}" for rank, reason in reasons if reason]
        if problems:
            raise self.checkpoints.unwritten(self.step, problems[0])
        return self.checkpoints.path(self.step)

    def close(self) -> None:
        """Finish writing this rank's files. Only a single rank completes its save: with several, others may be gone."""
        super().close()
        if self.world.size == 1:
            with suppress(CheckpointError):  # the error that ends the run says more
                self.finished()

    def complete(self, files: dict[str, dict[str, Any]]) -> None:
        """Put the ranks' files into a folder with state and manifest, atomically."""
        target = self.checkpoints.path(self.step)
        staging = target.with_suffix(".ranks")

        def write(folder: Path) -> None:
            for name in files:
                (staging / name).rename(folder / name)
            (folder / STATE).write_text(self.common, encoding="utf-8")
            manifest = files | {STATE: fingerprint(folder / STATE)}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

        atomic_save(target, write)
        shutil.rmtree(staging)

    def is_best(self, loss: float) -> bool:
        """Whether a loss is the best so far, decided by rank 0."""
        return self.world.gather_objects(super().is_best(loss))[0]


def contents_of(files: Mapping[str, Shards]) -> dict[str, Described]:
    """This rank's share of the table of contents: by set of tensors, dtype and shape of the whole of each of which it writes a shard. The
    random state of each rank is a set of its own."""
    found: dict[str, Described] = {}
    for file, shards in files.items():
        name = Path(file).stem
        tensors = found.setdefault(name if name.startswith("random") else name.split("-")[0], {})
        for (entry, region), tensor in shards.items():
            tensors[entry] = table_entry(tensor.dtype, region.shape)
    return found


def empty_folder(path: Path) -> str | None:
    """Make a folder for the ranks' files, and remove the leftovers of discarded saves. Returns an error message."""

    def make() -> None:
        for leftover in path.parent.glob("*.ranks"):
            shutil.rmtree(leftover)
        path.mkdir(parents=True)

    return problem_of(make)


def problem_of(work: Callable[[], None]) -> str | None:
    """Do it, and return the operating system's words where it fails."""
    try:
        work()
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
