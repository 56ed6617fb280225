"""Checkpoints from the CPU to the GPU and back, and resume on the GPU after an end and after a kill: to the bit.

The resumed runs use dropout, bfloat16 and deterministic algorithms, so that two uninterrupted runs have the same bits too: the first row
says whether they do, without which the others would show nothing.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # the run that is killed, in a process of its own
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

import torch
from gpu_machine import Machine, deterministic
from gpu_models import M124, TINY, batch_of, same_bits
from gpu_rows import Row
from rich.console import Console
from torch import Tensor

from shared.course.paths import CHECKOUT
from shared.engine.callbacks import Callback
from shared.engine.checkpoint.folder import Checkpoints
from shared.engine.checkpoint.snapshot import restore, take_snapshot
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic with this, and says so with nothing
STEPS, KILLED = 6, 4
OPTIMIZERS = {
    "AdamW, fused": OptimizerConfig("adamw", lr=1e-3, fused=True),
    "AdamW": OptimizerConfig("adamw", lr=1e-3),
    "Muon": OptimizerConfig("muon", lr=1e-3),
}


def run(machine: Machine, small: bool) -> Iterator[Row]:
    for name, optimizer in list(OPTIMIZERS.items())[: 1 if small else None]:
        yield from across(machine, name, optimizer, small)
    with deterministic(), tempfile.TemporaryDirectory() as folder:
        yield from resumed(machine, Path(folder), small)


def across(machine: Machine, name: str, optimizer: OptimizerConfig, small: bool) -> Iterator[Row]:
    """Weights and optimizer state of a run on one device, saved, read on the other, saved there and read back."""
    cpu = torch.device("cpu")
    for here, there in ((cpu, machine.device), (machine.device, cpu)):
        with tempfile.TemporaryDirectory() as folder:
            first, second, third = (state_on(device, optimizer, small, seed) for seed, device in enumerate((here, there, here)))
            step_once(*first, small)
            checkpoints = Checkpoints(Path(folder))
            for (model, stepper), into in ((first, second), (second, third)):
                checkpoints.save(take_snapshot(1, model, stepper, {}))
                restore(checkpoints.load(1), *into, {})
            same = same_bits(state_of(*third), state_of(*first)) and same_bits(state_of(*second), state_of(*first))
            step_once(*third, small)  # the state is where the optimizer wants it
        yield Row(f"{name}: {here.type} to {there.type} and back", {"tensors": len(state_of(*first))}, same, "equal bits")


def state_on(device: torch.device, optimizer: OptimizerConfig, small: bool, seed: int):
    model = TransformerModel(TINY if small else replace(M124, num_hidden_layers=2, vocab_size=4096), seed=seed).to(device)
    return model, build_optimizer(model, optimizer)


def step_once(model, stepper, small: bool) -> None:
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in batch_of(model.config, 2, 32).items()}
    stepper.zero_grad()
    totals = packed_next_token_objective(model, batch)
    (totals.loss_sum / totals.token_count).backward()
    stepper.step()


def state_of(model, stepper) -> dict[str, Tensor]:
    snapshot = take_snapshot(1, model, stepper, {})
    state = {f"{key}/{name}": tensor for name, tensors in snapshot.optimizer.tensors.items() for key, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in (snapshot.weights | state).items()}


def resumed(machine: Machine, folder: Path, small: bool) -> Iterator[Row]:
    """Runs of the engine: twice without an interruption, stopped and resumed, killed and resumed."""
    device, size = machine.device.type, "small" if small else "full"
    whole = weights_after(folder / "whole", device, size, STEPS)
    yield Row("two runs have the same bits", {"steps": STEPS}, same_bits(weights_after(folder / "again", device, size, STEPS), whole))
    weights_after(folder / "stopped", device, size, STEPS // 2)
    yield Row("stopped and resumed", {"after step": STEPS // 2}, same_bits(weights_after(folder / "stopped", device, size, STEPS), whole))
    words = [sys.executable, __file__, str(folder / "killed"), device, size]
    ended = subprocess.run(words, cwd=CHECKOUT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    saved = Checkpoints(folder / "killed" / "checkpoints").steps()
    after = weights_after(folder / "killed", device, size, STEPS)
    holds = ended.returncode == -signal.SIGKILL and bool(saved) and same_bits(after, whole)
    yield Row("killed and resumed", {"saved steps": str(saved), "exit code": ended.returncode}, holds, ended.stderr[-300:])


class KillYourself(Callback):
    """SIGKILL in the middle of a step, when the forward and the backward pass are over."""

    def before_optimizer(self, engine: RuntimeEngine) -> None:
        if engine.step + 1 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class Rows:
    """A loader with a position."""

    def __init__(self, config, rows: int, seq: int):
        self.config, self.rows, self.seq, self.step = config, rows, seq, 0

    def __iter__(self):
        while True:
            batch = batch_of(self.config, self.rows, self.seq, seed=self.step, packed=True)
            self.step += 1
            yield [batch]

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def weights_after(folder: Path, device: str, size: str, steps: int, callbacks=()) -> dict[str, Tensor]:
    """Train until so many steps are done, from what the folder holds. A new model has other weights and other random numbers each time."""
    config = replace(TINY if size == "small" else replace(M124, num_hidden_layers=4, vocab_size=8192), hidden_dropout=0.1)
    rows, seq = (2, 32) if size == "small" else (8, 512)
    fresh = not folder.exists()
    torch.manual_seed(1 if fresh else 99)
    model = TransformerModel(config, seed=0 if fresh else 99)
    model.to(device)
    optimizer = build_optimizer(model, OptimizerConfig("muon", lr=1e-3))
    settings = EngineConfig(
        folder, device=device, log_every=2, evaluate_every=0, trackers=["jsonl"],
        checkpoint=CheckpointConfig(every=1, asynchronous=not callbacks),  # so that the one before the kill is complete
    )  # fmt: skip
    engine = RuntimeEngine(
        model, optimizer, settings, objective=autocast_objective(packed_next_token_objective, "bfloat16"), updater=Update(1.0),
        callbacks=callbacks or None, console=Console(quiet=True),
    )  # fmt: skip
    engine.fit(Rows(config, rows, seq), steps=steps)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    with deterministic():
        weights_after(Path(sys.argv[1]), sys.argv[2], sys.argv[3], STEPS, [KillYourself()])
