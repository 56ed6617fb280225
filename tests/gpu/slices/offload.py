"""The optimizer's state in the CPU's memory, and activation checkpointing: the same weights, and less of the GPU's memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_machine import Machine
from gpu_models import M124, TINY, batch_of, distance, moved, same_bits
from gpu_rows import Row
from torch import Tensor

from shared.loop import accumulate_gradients, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel

OPTIMIZERS = {"AdamW": OptimizerConfig("adamw", lr=1e-3), "Muon": OptimizerConfig("muon", lr=1e-3, newton_schulz_dtype="float32")}
PRECISIONS = ("float32", "bfloat16")


def run(machine: Machine, small: bool) -> Iterator[Row]:
    for name, optimizer in OPTIMIZERS.items():
        yield offloaded(machine, name, optimizer, small)
    for precision in PRECISIONS:
        yield from recomputed(machine, precision, small)


def offloaded(machine: Machine, name: str, optimizer: OptimizerConfig, small: bool) -> Row:
    """Three steps with the state here and there. The update is computed by another processor, so weights are close and not equal."""
    here, peak, seconds, _ = trained(machine, ParallelConfig(), optimizer, "float32", small)
    there, peak_there, seconds_there, home = trained(machine, ParallelConfig(offload_optimizer=True), optimizer, "float32", small)
    far, _ = distance(there, here)
    figures = {"difference": far, "peak GiB": peak, "offloaded": peak_there, "ms of a step": None, "offloaded, ms": None}
    if machine.is_gpu:
        figures |= {"ms of a step": seconds * 1e3, "offloaded, ms": seconds_there * 1e3}
    less = not machine.is_gpu or (peak_there < peak and home == {"cpu"})
    return Row(f"{name}'s state on the CPU", figures, far <= 1e-3 and less, "weights to 1e-3; less memory; all state on the CPU")


def recomputed(machine: Machine, precision: str, small: bool) -> Iterator[Row]:
    """A block that is computed again does the same operations, so weights are equal to the bit where the kernels are deterministic."""
    kept, peak, seconds, _ = trained(machine, ParallelConfig(), OPTIMIZERS["AdamW"], precision, small)
    for how in ("full", "selective"):
        layout = replace(ParallelConfig(), activation_checkpointing=how)
        again, peak_again, seconds_again, _ = trained(machine, layout, OPTIMIZERS["AdamW"], precision, small)
        figures = {"equal bits": same_bits(again, kept), "difference": distance(again, kept)[0], "peak GiB": peak, "recomputed": peak_again}
        figures["times as long"] = seconds_again / seconds if machine.is_gpu else None
        less = not machine.is_gpu or peak_again < peak
        note = "weights to 1e-3, since attention's backward may add in any order; less memory"
        yield Row(f"activation checkpointing {how}, {precision}", figures, figures["difference"] <= 1e-3 and less, note)


def trained(
    machine: Machine, layout: ParallelConfig, optimizer: OptimizerConfig, precision: str, small: bool
) -> tuple[dict[str, Tensor], float | None, float, set[str]]:
    """Weights after three steps of two micro-batches, peak memory in GiB, seconds of a step, and where the optimizer's state is."""
    machine.free()
    config = TINY if small else replace(M124, num_hidden_layers=6, vocab_size=8192)
    rows, seq = (2, 32) if small else (8, 512)
    mesh = Mesh(layout, SingleRankCommunicator())
    dtype = None if precision == "float32" else getattr(torch, precision)
    strategy = apply_parallel(TransformerModel(config).to(machine.device), mesh, optimizer, dtype, machine.device)
    stepper = build_optimizer(strategy.optim_params, optimizer, strategy.routes)
    objective, update = autocast_objective(packed_next_token_objective, precision), Update(1.0, norm=strategy.grad_norm)
    runner, updater = strategy.runner(accumulate_gradients), strategy.updater(update)

    def step(number: int) -> None:
        batches = [moved(batch_of(config, rows, seq, seed=2 * number + i, packed=True), machine.device) for i in range(2)]
        train_step(strategy.model, stepper, batches, objective, runner, counted_on_the_cpu(strategy.reducer), updater)

    step(0)
    peak, _ = machine.peak_gib(lambda: step(1))
    seconds = machine.wall_seconds(lambda: step(2))
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in strategy.state.state_dict().items()}
    home = {value.device.type for state in stepper.state.values() for value in state.values() if isinstance(value, Tensor)}
    return weights, peak, seconds, home


def counted_on_the_cpu(reducer):
    """The engine hands the token count to the updater on the CPU; so does this."""

    def reduce(model, totals):
        totals = reducer(model, totals)
        return totals._replace(token_count=totals.token_count.cpu())

    return reduce
