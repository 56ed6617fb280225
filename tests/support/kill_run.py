"""A tiny run on any layout that may be killed at any moment: started by `kill_table.py`, over processes or under torchrun.

`torchrun ... tests/support/kill_run.py FOLDER LAYOUT BACKEND`. What a resume must bring back is in it: dropout on every rank, a schedule,
AdamW or Muon, a loader, sums since the last log. It trains until the file `enough` is in its folder, or for `steps`.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from runs import Loader

from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.engine.trackers.jsonl import JsonlTracker
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig, ScheduleConfig
from shared.optim.schedules import ScheduleLearningRate
from shared.optim.updater import Update
from shared.output_files import write_atomically
from shared.parallel.comm.communicator import CommunicationError, Communicator
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.health.heartbeat import EXIT_CODE
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.processes.torchrun import from_torchrun

MODEL = ModelConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, hidden_dropout=0.1)
ENDLESS = 10**6
ROWS = 8


class Rows(Loader):
    """Each step two micro-batches of this rank's share."""

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        self.rank, self.ranks = rank, ranks

    def microbatches(self):
        return [self.microbatch(number) for number in range(2)]

    def microbatch(self, number: int):
        ids = torch.randint(MODEL.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(10 * self.step + number))
        ids = ids.chunk(self.ranks)[self.rank]
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


class Signs(Callback):
    """Says that this rank trains, by its process's number in a file, and ends the run where somebody says that it is enough."""

    every_rank = True

    def __init__(self, folder: Path):
        self.folder = folder

    def on_step(self, engine):
        sign = self.folder / "signs" / str(engine.strategy.rank)
        sign.parent.mkdir(exist_ok=True)
        if not sign.exists() or sign.read_text() != str(os.getpid()):
            write_atomically(sign, str(os.getpid()).encode())
        if (self.folder / "enough").exists():
            engine.stop("enough")


def train(world: Communicator, folder: Path, layout: str, backend: str, steps: int = ENDLESS) -> str | None:
    """The run on one rank. Returns the signal that ended it early; a run that has ended leaves its digest."""
    config = parse_layout(layout, ParallelConfig(backend=backend))
    mesh, zero = Mesh(config, world), bool(config.zero)
    muon = OptimizerConfig("muon", lr=0.02, newton_schulz_dtype="float32")
    optimizer = muon if zero else OptimizerConfig("adamw", lr=0.01)
    strategy = apply_parallel(TransformerModel(MODEL, seed=0), mesh, optimizer)
    torch.manual_seed(mesh.data.rank)
    engine = RuntimeEngine(
        strategy,
        build_optimizer(strategy.optim_params, optimizer, strategy.routes),
        EngineConfig(folder, device="cpu", log_every=5, checkpoint=CheckpointConfig(every=3, asynchronous=True)),
        updater=Update(1.0, norm=strategy.grad_norm),
        callbacks=[ScheduleLearningRate(ScheduleConfig("cosine", 4000, 20)), JsonlTracker(), Signs(folder)],
    )
    engine.fit(Rows(mesh.data.rank, mesh.data.size), steps=steps)
    weights = strategy.full_weights()
    if engine.leaving:
        return engine.stopped
    if strategy.rank == 0:
        whole = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(weights.items()))
        digest = {"step": engine.step, "sha256": hashlib.sha256(whole).hexdigest()}
        (folder / "digest.json").write_text(json.dumps(digest))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, layout, backend = sys.argv[1:]
    world, _ = from_torchrun(heartbeat_timeout=20.0, device="cpu")
    try:
        left = train(world, Path(folder), layout, backend)
    except CommunicationError as error:
        print(f"rank {world.rank} ends: {error}", flush=True)
        os._exit(EXIT_CODE)
    sys.exit(128 + signal.Signals[left] if left else 0)
