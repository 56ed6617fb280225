"""Muon's time: Newton-Schulz in bfloat16, float32 and TF32, and the optimizer's share of a step, beside AdamW fused and not."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_machine import Machine, tf32
from gpu_models import M124, TINY, batch_of, moved, step_of
from gpu_rows import Row

from shared.model.roles import parameters_by_role
from shared.optim.config import OptimizerConfig
from shared.optim.muon import newton_schulz

STEPS = 5
OPTIMIZERS = {
    "Muon in bfloat16": OptimizerConfig("muon"),
    "Muon in float32": OptimizerConfig("muon", newton_schulz_dtype="float32"),
    "Muon, its AdamW fused": OptimizerConfig("muon", fused=True),
    "AdamW": OptimizerConfig("adamw"),
    "AdamW, fused": OptimizerConfig("adamw", fused=True),
}


def run(machine: Machine, small: bool) -> Iterator[Row]:
    config = TINY if small else M124
    size, inner = config.hidden_size, config.resolved().intermediate_size
    for shape in ((12, size, size), (12, inner, size), (12, size, inner)):
        yield from products(machine, shape if not small else (2, *shape[1:]), small)
    for name, optimizer in OPTIMIZERS.items():
        yield share_of_a_step(machine, name, config, optimizer, small)
        machine.free()


def products(machine: Machine, shape: tuple[int, int, int], small: bool) -> Iterator[Row]:
    """Newton-Schulz of a batch of matrices, and how close it comes to float64's result."""
    gradients = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(gradients[:1].double(), STEPS)
    shorter, longer = sorted(shape[1:])
    operations = shape[0] * STEPS * 2 * (2 * shorter * shorter * longer + shorter**3)
    for name, dtype, bound in (("bfloat16", torch.bfloat16, 0.1), ("float32", torch.float32, 1e-3), ("TF32", torch.float32, 2e-2)):
        there = gradients.to(machine.device, dtype)
        with tf32(name == "TF32"):
            far = float((newton_schulz(there[:1], STEPS).double().cpu() - exact).norm() / exact.norm())
            seconds = machine.seconds(lambda there=there: newton_schulz(there, STEPS), repeats=1 if small else 20)
        figures = {"difference": far, "ms": seconds * 1e3 if machine.is_gpu else None}
        figures["TFLOP/s"] = operations / seconds / 1e12 if machine.is_gpu else None
        yield Row(f"Newton-Schulz of {' x '.join(map(str, shape))}, {name}", figures, far <= bound, f"at most {bound:g} from float64's")


def share_of_a_step(machine: Machine, name: str, config, optimizer: OptimizerConfig, small: bool) -> Row:
    rows, seq = (2, 32) if small else (8, 1024)
    step = step_of(config, machine.device, "bfloat16", replace(optimizer, lr=1e-3))
    batch = moved(batch_of(config, rows, seq), machine.device)
    repeats = 1 if small else 10
    whole = machine.seconds(lambda: step(batch), repeats, warmup=1)
    alone = machine.seconds(step.optimizer.step, repeats, warmup=0)
    matrices = len(parameters_by_role(step.model)["matrix"])
    figures = {"matrices": matrices, "ms of a step": None, "ms of the optimizer": None, "share": None}
    if machine.is_gpu:
        figures |= {"ms of a step": whole * 1e3, "ms of the optimizer": alone * 1e3, "share": alone / whole}
    return Row(f"{name}, {rows} x {seq} tokens", figures)
