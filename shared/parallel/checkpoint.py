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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shared.engine.checkpoint.atomic import atomic_save, force_to_disk
from shared.engine.checkpoint.files import ShardFiles, Shards, contents_of, rank_file, whole_shards, write_files
from shared.engine.checkpoint.folder import MANIFEST, STATE, Checkpoints, Result, complete, plain_random, reason_of, require_intact
from shared.engine.checkpoint.folder import state_text
from shared.engine.checkpoint.saver import Saver, copied
from shared.engine.checkpoint.snapshot import Snapshot
from shared.engine.checkpoint.soundness import CheckpointError, DamagedCheckpoint, Described
from shared.model.sharding import whole_region
from shared.parallel.health.agreement import agreed, rank_names, ranks_that_share
from shared.parallel.health.replicas import require_equal_state
from shared.parallel.held import Held


class RankCheckpoints(Checkpoints):
    """Chapter 04's checkpoints as one rank of many reads them: its shards of the tensors, and its share of the checksums.

    Every rank makes the same calls at the same time, and gets the same answers.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, held: Held):
        elsewhere = {*held.holders.shapes, *held.optim_holders.shapes}
        super().__init__(folder, keep_last, keep_best, ShardFiles(held.weight_regions, held.optim_regions, elsewhere))
        self.held, self.world, self.rank = held, held.mesh.world, held.mesh.world.rank
        self.sharing: Sequence[int] = range(self.world.size)  # the ranks that see this folder, until `RankSaver.begin` has looked

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same folder."""
        return len(self.sharing) == self.world.size

    def candidates(self) -> tuple[Sequence[int], list[str]]:
        """The steps that all machines have, and a sentence for each newer one that is not everywhere."""
        everyone = self.world.gather_objects({str(step): self.identity(step) for step in self.steps()})
        for rank, of_rank in enumerate(everyone):
            if self.shared and of_rank.keys() != everyone[0].keys():
                raise CheckpointError(
                    f"Rank {rank} sees checkpoints of steps {list(of_rank)} in {self.folder}, and rank 0 sees {list(everyone[0])}: "
                    "all ranks need the same folder, on storage that all machines share."
                )
        found = sorted({int(step) for of_rank in everyone for step in of_rank})
        common = [step for step in found if len({of_rank.get(str(step), "") for of_rank in everyone}) == 1]
        if found and not common:
            seen = "; ".join(f"rank {rank} has {', '.join(of_rank) or 'none'}" for rank, of_rank in enumerate(everyone))
            raise CheckpointError(
                f"The machines share no folder, and no step is the same in {self.folder} on all of them ({seen}): copy the checkpoints of "
                "one machine to the others, or choose another output folder."
            )
        return common, [f"Step {step} of {self.folder} is not the same on all machines." for step in found if step > max(common)]

    def identity(self, step: int) -> str:
        """What tells a step apart from the same step of another run, without reading all of it; every machine has the same."""
        try:
            return json.loads((self.path(step) / MANIFEST).read_text(encoding="utf-8"))[STATE]["sha256"]
        except (OSError, ValueError, TypeError, KeyError):
            return "damaged"

    def load(self, step: int) -> Snapshot:
        """The snapshot with this rank's numbers, and of the optimizer's groups and values those that it has parameters of."""
        snapshot = self.agreed(partial(super().load, step))
        held = self.held.optim_regions
        elsewhere = self.held.optim_holders.shapes.keys() - held.keys()
        stateless = elsewhere | {name for name, region in held.items() if not region.numel}
        values = {name: of_name for name, of_name in snapshot.optimizer.values.items() if name not in stateless}
        groups = [
            group | {"names": [name for name in group["names"] if name not in elsewhere]} for group in snapshot.optimizer.groups
        ]
        return replace(snapshot, optimizer=replace(snapshot.optimizer, values=values, groups=groups))

    def require_intact(self, folder: Path) -> None:
        """Verify checksums on all ranks, before any rank reads a file that may be damaged."""
        share = slice(self.sharing.index(self.world.rank), None, len(self.sharing))
        self.agreed(partial(require_intact, folder, share))

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; where it fails on any rank, raise the same error on all. Damage comes first: what is
        damaged fits no run."""
        return agreed(self.world, call, CheckpointError, DamagedCheckpoint)


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
        return partial(stage_files, staging, copied(files) if self.asynchronous else files, problem)

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
            files["random", of_rank] = whole_shards(states)
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
        own = [values, plain_random(snapshot), [group["names"] for group in snapshot.optimizer.groups], contents_of(files)]
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
        text = state_text(snapshot, notes, contents, [random for _, random, *_ in everyone[1:]])
        return text if self.checkpoints.shared else self.world.gather_objects(text)[0]

    def finished(self, wait: bool = False) -> Path | None:
        """The checkpoint that was completed since the last call, if any. Every rank calls it between two steps."""
        if self.pending is None:
            return None
        if wait:
            self.pending.exception()
        under_way = torch.tensor([float(not self.pending.done())])  # between hosts, which wait for no GPU
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

    def complete(self, files: dict[str, dict[str, Any]]) -> None:
        """Put the ranks' files into a folder with state and manifest, atomically."""
        target = self.checkpoints.path(self.step)
        staging = target.with_suffix(".ranks")

        def write(folder: Path) -> None:
            for name in files:
                (staging / name).rename(folder / name)
            complete(folder, files, self.common)

        atomic_save(target, write)
        shutil.rmtree(staging)

    def is_best(self, loss: float) -> bool:
        """Whether a loss is the best so far, decided by rank 0."""
        return self.world.gather_objects(super().is_best(loss))[0]


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


def stage_files(folder: Path, files: dict[str, Shards], problem: str | None) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Write this rank's files, and force them to the disk of its machine. Returns each file's fingerprint, and an error message."""
    try:
        written = write_files(folder, files) if problem is None else {}
        for name in written:
            force_to_disk(folder / name)
        return written, problem
    except (OSError, SafetensorError) as error:
        return {}, reason_of(error)
