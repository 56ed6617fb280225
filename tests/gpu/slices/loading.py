"""Batches on their way to the GPU, pinned or not, and how often the host waits for the device in a step of the engine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_machine import Machine
from gpu_models import M124, TINY, batch_of, moved
from gpu_rows import Row
from rich.console import Console

from shared.devices import on_device
from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.defaults import default_callbacks
from shared.engine.engine import RuntimeEngine
from shared.loop import accumulate_gradients
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel

STEPS = 4


def run(machine: Machine, small: bool) -> Iterator[Row]:
    yield copies(machine, small)
    yield arrived(machine, small)
    for precision in ("float32", "bfloat16", "float16"):
        yield waits(machine, precision, small)
        machine.free()


def copies(machine: Machine, small: bool) -> Row:
    """A micro-batch of the trainer: four tensors of [16, 1024] int64. The host's time is what the training loop spends."""
    batch = batch_of(TINY if small else M124, 2 if small else 16, 32 if small else 1024, packed=True)
    figures: dict[str, float | None] = {}
    for name, copy in {"plain": lambda: moved(batch, machine.device), "on_device": lambda: on_device(batch, machine.device)}.items():
        copy()
        until_done = machine.wall_seconds(copy)
        figures |= {f"{name}, ms until it is there": until_done * 1e3 if machine.is_gpu else None}
        with machine.host_waits() as waited:
            copy()
        figures[f"{name}, host waits"] = sum(waited.places.values()) if machine.is_gpu else None
    holds = not machine.is_gpu or figures["on_device, host waits"] == 0
    return Row("a micro-batch to the device", figures, holds, "on_device pins, and does not wait")


def arrived(machine: Machine, small: bool) -> Row:
    """Copies are asynchronous, so the pinned memory they are read from must not be used again too early: many batches in a row."""
    batches = [batch_of(TINY, 2 if small else 16, 32 if small else 1024, seed=seed) for seed in range(4 if small else 64)]
    there = [on_device(batch, machine.device) for batch in batches]
    same = all(torch.equal(a[name].cpu(), b[name]) for a, b in zip(there, batches, strict=True) for name in b)
    return Row(f"{len(batches)} batches in a row arrive as they were", {}, same)


class CountWaits(Callback):
    """Counts the host's waits from the end of the first step to the end of another `STEPS`, which log nothing and save nothing."""

    def __init__(self, machine: Machine):
        self.waits = machine.host_waits()

    def on_step(self, engine: RuntimeEngine) -> None:
        if engine.step == 1:
            self.waits.__enter__()
        if engine.step == 1 + STEPS:
            self.waits.__exit__(None, None, None)


def waits(machine: Machine, precision: str, small: bool) -> Row:
    """One wait a step, for loss, count and norm together; float16's overflow needs a second one."""
    config = TINY if small else M124
    rows, seq = (2, 32) if small else (4, 1024)
    batches = [batch_of(config, rows, seq, seed=seed, packed=True) for seed in range(2)]
    counting = CountWaits(machine)
    with tempfile.TemporaryDirectory() as folder:
        engine_of(machine, Path(folder), config, precision, counting).fit([batches] * (2 + STEPS), steps=2 + STEPS)
    allowed = 2 if precision == "float16" else 1
    found = counting.waits.places
    if found is None:
        return Row(f"host waits in a step, {precision}", {"waits a step": None}, None, f"at most {allowed} a step")
    figures = {"waits a step": sum(found.values()) / STEPS, **{place: count / STEPS for place, count in sorted(found.items())}}
    return Row(f"host waits in a step, {precision}", figures, 0 < figures["waits a step"] <= allowed, f"at most {allowed} a step")


def engine_of(machine: Machine, folder: Path, config, precision: str, counting: CountWaits) -> RuntimeEngine:
    strategy = apply_parallel(
        TransformerModel(config).to(machine.device), Mesh(ParallelConfig(), SingleRankCommunicator()), OptimizerConfig("muon"), None,
        machine.device,
    )  # fmt: skip
    scaler = LossScaler(LossScaleConfig(initial=2.0**8)) if precision == "float16" else None
    usual = EngineConfig(
        folder, device=machine.device.type, log_every=10**6, evaluate_every=0, trackers=["jsonl"], checkpoint=CheckpointConfig(every=0)
    )
    return RuntimeEngine(
        strategy,
        build_optimizer(strategy.optim_params, OptimizerConfig("muon", lr=1e-4), strategy.routes),
        usual,
        objective=autocast_objective(packed_next_token_objective, precision),
        runner=scaler.scaled(strategy.runner(accumulate_gradients)) if scaler else None,
        updater=Update(1.0, scaler, strategy.grad_norm),
        callbacks=[counting, *default_callbacks(usual, machine.device, config)],
        console=Console(quiet=True),
    )
