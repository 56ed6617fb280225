"""A small run over ranks that torchrun starts, with a fault on purpose: `torchrun ... tests/support/parallel_script.py FOLDER [options]`.

Every rank trains the byte model on its own share of each step; rank 0 saves. A fault happens once: not in the ranks of a restart.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from chapters.byte_models import ByteModel
from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.checkpoint.folder import Checkpoints
from shared.engine.config import EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.engine.checkpoint.saver import Saver
from shared.loss import next_token_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.data.ddp import DataParallel
from shared.parallel.mesh import Mesh
from shared.parallel.processes.torchrun import from_torchrun
from shared.parallel.health.replicas import ReplicaCheck, StepCounter
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Totals

SEQ = 8


class Shares:
    """Two unequal micro-batches a step, a function of step and rank; its state is how many steps it gave."""

    def __init__(self, rank: int):
        self.rank, self.given = rank, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
            self.given += 1
            yield [self.batch(rows, generator) for rows in (3 + self.rank, 2)]

    def batch(self, rows, generator):
        ids = (torch.randint(0, 10, (rows, 1), generator=generator) + torch.arange(SEQ + 1)) % 10
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].masked_fill(torch.rand(rows, SEQ, generator=generator) < 0.2, -100)}

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class FirstSaves(Saver):
    """All ranks hold the same, so the first one writes it."""

    def __init__(self, state, checkpoints, rank: int):
        super().__init__(state, checkpoints, asynchronous=False)
        self.rank = rank

    def save(self, *arguments):
        if self.rank == 0:
            super().save(*arguments)


class Replicas(ParallelStrategy):
    """Ranks that hold the same, and do not agree before they save."""

    def saver(self, folder, *options):
        return FirstSaves(self.module, Checkpoints(folder, 2, False), self.rank)

    def callbacks(self):
        return [StepCounter(self.mesh.world.trace), ReplicaCheck(self, check_every=1)]


class Fault:
    """An objective in which a rank, at one step, does what it should not."""

    def __init__(self, kind: str, at: int, world: Communicator):
        self.kind, self.at, self.world, self.engine = kind, at, world, None

    def __call__(self, model, batch):
        if self.kind and self.engine.step + 1 == self.at:
            kind, self.kind = self.kind, ""
            print(f"fault at {time.time():.2f}", flush=True)
            self.happen(kind, model)
        return next_token_objective(model, batch)

    def happen(self, kind, model):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "sleep":
            time.sleep(10**6)
        elif kind == "error":
            raise CourseError("a file that only this rank needs is missing")
        elif kind == "elsewhere":
            self.world.barrier()
        elif kind == "more":
            self.engine.strategy.reducer(model, Totals(torch.zeros(()), torch.tensor(1), {}))
        elif kind == "nudge":
            with torch.no_grad():
                weight = list(model.parameters())[2].view(-1)
                weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))


FAULTS = ["kill", "stop", "sleep", "error", "elsewhere", "more", "nudge"]


def make_model() -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(vocab_size=10, window=4, embedding_size=4, hidden_size=16, dropout=0.0)


def train(world: Communicator, options: argparse.Namespace, model: ByteModel) -> dict[str, torch.Tensor]:
    """The run, and its last weights."""
    device = torch.device("cpu")
    mesh = Mesh(ParallelConfig(data_parallel=world.size), world)
    parallel = Replicas(model, mesh, [DataParallel(model, mesh.data)])
    first_time = not options.folder.exists()
    world.barrier()
    fault = Fault(options.fault if world.rank == options.rank and first_time else "", options.at, world)
    engine = RuntimeEngine(
        parallel,
        torch.optim.AdamW(parallel.optim_params.parameters(), lr=0.01),
        EngineConfig(options.folder, device=device.type, log_every=100),
        objective=fault,
        callbacks=[Slow(options.slow)],
    )
    engine.config.checkpoint.every = options.save_every
    fault.engine = engine
    engine.fit(Shares(world.rank), steps=options.steps)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Slow(Callback):
    """Steps of a length that heartbeats can follow."""

    every_rank = True

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_step(self, engine):
        time.sleep(self.seconds)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    parser.add_argument("--at", type=int, default=4, help="the step, from 1")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds of sleep in each step")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--collective-timeout", type=float, default=60.0)
    return parser.parse_args(words)


def main(options: argparse.Namespace) -> None:
    world, _ = from_torchrun(options.timeout, "cpu", options.collective_timeout)
    weights = train(world, options, make_model())
    if world.rank == 0:
        save_file(weights, options.folder / "weights.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(parsed(sys.argv[1:]))
    except CourseError as error:
        print(f"at {time.time():.2f} rank {os.environ.get('RANK', 0)} ends: {error}", flush=True)
        sys.exit(1)
