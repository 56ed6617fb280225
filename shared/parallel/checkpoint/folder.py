"""Chapter 06. Sharded checkpoints as one rank reads them: its shards, its share of the checksums, the newest step of all machines.

Where machines share no folder, each has a whole checkpoint of its own (`shared.parallel.checkpoint.saver`), and a step counts only if it is
the same on all of them.

Left out on purpose: fetching a checkpoint from another machine. Copy the folder.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shared.engine.checkpoint.folder import MANIFEST, STATE, Checkpoints, Result, require_intact
from shared.engine.checkpoint.snapshot import RandomState, Snapshot, get_random_state
from shared.engine.checkpoint.soundness import RANDOM_STATE, CheckpointError, DamagedCheckpoint, misfit
from shared.parallel.checkpoint.files import ShardFiles, rank_file
from shared.parallel.health.agreement import agreed
from shared.parallel.held import Held

RANDOM = "random_of_ranks"  # in state.json: what Python and NumPy draw from, by rank


class RankCheckpoints(Checkpoints):
    """Chapter 04's checkpoints as one rank of many reads them: its shards of the tensors, and its share of the checksums.

    Every rank makes the same calls at the same time, and gets the same answers.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, held: Held):
        elsewhere = {*held.holders.shapes, *held.optim_holders.shapes}
        storage = ShardFiles(held.weight_regions, held.optim_regions, elsewhere)
        super().__init__(folder, keep_last, keep_best, storage)
        self.held, self.world = held, held.mesh.world
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
        held, everywhere = self.held.optim_regions, self.held.optim_holders.shapes
        values = {name: of_name for name, of_name in snapshot.optimizer.values.items() if name not in held or held[name].numel}
        groups = [
            group | {"names": [name for name in group["names"] if name in held or name not in everywhere]}
            for group in snapshot.optimizer.groups
        ]
        values = {name: of_name for name, of_name in values.items() if name in held or name not in everywhere}
        return replace(snapshot, optimizer=replace(snapshot.optimizer, values=values, groups=groups))

    def require_intact(self, folder: Path) -> None:
        """Verify checksums on all ranks, before any rank reads a file that may be damaged."""
        share = slice(self.sharing.index(self.world.rank), None, len(self.sharing))
        self.agreed(partial(require_intact, folder, share))

    def agreed(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; where it fails on any rank, raise the same error on all. Damage comes first: what is
        damaged fits no run."""
        return agreed(self.world, call, CheckpointError, DamagedCheckpoint)

    def random_state(self, folder: Path, state: dict[str, Any]) -> RandomState:
        """This rank's random state. A rank that did not exist when the run was saved keeps the state that it was started with."""
        if wrong := misfit(state.get(RANDOM, []), [RANDOM_STATE], RANDOM):
            raise DamagedCheckpoint.of(folder, f"{wrong}.")
        of_ranks = [state["random"], *state.get(RANDOM, [])]
        if self.world.rank >= len(of_ranks):
            return get_random_state()
        name = Path(rank_file("random", self.world.rank, len(of_ranks))).stem
        return self.usable(folder, name, state, of_ranks[self.world.rank])
