"""The same training step on the CPU and on the GPU: loss, every gradient and the new weights, in five precisions and for each family."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from gpu_machine import Machine, tf32
from gpu_models import FAMILIES, batch_of, distance, family, moved, step_of, tensors_of
from gpu_rows import Row

import shared.model.block as stack
from shared.model.config import ModelConfig
from shared.model.rope import RopeTables, rope_tables

TOLERANCES = {  # precision -> what the CPU computes in for comparison, how many times further the GPU may be, and the reason
    "float64": ("float64", 0, "at most 1e-9: another order of adding in 53 bits; with the CPU's RoPE tables, which are float32 by design"),
    "float32": ("float32", 10, "at most 10 times the CPU's own distance: another order of adding"),
    "TF32": ("float16", 3, "at most 3 times the distance of the CPU's float16, which has as many bits of mantissa"),
    "bfloat16": ("bfloat16", 3, "at most 3 times the CPU's own distance, on the same autocast"),
    "float16": ("float16", 3, "at most 3 times the CPU's own distance, with the same loss scale"),
}
LEAST = 1e-9  # what is closer than this is close enough in any precision


def run(machine: Machine, small: bool) -> Iterator[Row]:
    for name in FAMILIES:
        yield from rows_of(machine, name, family(name, small), small)


def rows_of(machine: Machine, name: str, config: ModelConfig, small: bool) -> Iterator[Row]:
    """Distances are from the CPU's step in float64, of every gradient and every weight after the step."""
    seq, cpu = config.max_position_embeddings, torch.device("cpu")
    batch = batch_of(config, 2 if small else 4, seq)
    exact = one_step(config, batch, cpu, "float64")
    update = max(float((exact[2][each] - weight).norm()) for each, weight in start_of(config).items())
    own = ("float32", "bfloat16", "float16")
    known = {precision: distances(one_step(config, batch, cpu, precision), exact, update) for precision in own}
    known["float64"] = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    for precision, (compared, times, reason) in TOLERANCES.items():
        with tables_of_the_cpu() if precision == "float64" else nullcontext(), tf32(precision == "TF32"):
            far = distances(one_step(config, batch, machine.device, precision), exact, update)
        holds = all(far[each] <= max(times * known[compared][each], LEAST) for each in ("gradients", "weights"))
        yield Row(f"{name}, {precision}", far | {"CPU's own, gradients": known[compared]["gradients"]}, holds, reason)
    if config.position == "rope":
        positions = torch.arange(seq)
        here, there = (rope_tables(config.resolved(), positions.to(device), seq) for device in (cpu, machine.device))
        far = max(float((a - b.cpu()).abs().max()) for a, b in zip(here, there, strict=True))
        yield Row(f"{name}, RoPE tables", {"largest difference": far}, far <= 1e-6 * seq, "an angle's rounding grows with the position")


def distances(found: tuple, exact: tuple, update: float) -> dict:
    """Of the loss and of gradients relatively, of weights in units of the largest tensor's update."""
    far, where = distance(found[1], exact[1])
    weights = max(float((found[2][each] - weight).norm()) for each, weight in exact[2].items()) / update
    return {"loss": abs(found[0] - exact[0]) / exact[0], "gradients": far, "worst": where, "weights": weights}


def one_step(config: ModelConfig, batch: dict, device: torch.device, precision: str):
    """Loss, gradients and weights of one step of SGD."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    step = step_of(config, device, "float32" if precision == "TF32" else precision, dtype=dtype)
    totals = step(moved(batch, device))
    return totals.mean_loss, tensors_of(step, gradients=True), tensors_of(step)


def start_of(config: ModelConfig) -> dict:
    return tensors_of(step_of(config, torch.device("cpu"), dtype=torch.float64))


@contextmanager
def tables_of_the_cpu():
    """Within the block RoPE tables are computed on the CPU, so that float64 shows everything else to its last digits."""

    def on_cpu(config: ModelConfig, positions: torch.Tensor, length: int) -> RopeTables:
        return RopeTables(*(table.to(positions.device) for table in rope_tables(config, positions.cpu(), length)))

    stack.rope_tables = on_cpu
    try:
        yield
    finally:
        stack.rope_tables = rope_tables
