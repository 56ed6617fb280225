"""Compiled blocks and the compiled whole model: equal to eager, without graph breaks, without compiling again, and how much faster.

On a GPU the backend is inductor, whose kernels Triton makes; on a CPU the compiler's front alone runs what it has captured (eager).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from gpu_machine import Machine
from gpu_models import M124, TINY, Step, batch_of, distance, family, moved, step_of, tensors_of
from gpu_rows import Row
from torch._dynamo.utils import counters

from shared.model.config import ModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.data.fsdp import compile_each

ADAMW = OptimizerConfig("adamw", lr=1e-3, fused=True)
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}  # fused kernels round less often, so bfloat16 differs as much as it does from float32

WHOLE, BLOCKS = "whole model", "each block"
CASES = [  # those that matter most last, where a small start takes them
    ("bert", BLOCKS, "bfloat16"), ("t5", BLOCKS, "bfloat16"), ("gpt2", WHOLE, "bfloat16"), ("gpt2", BLOCKS, "bfloat16"),
    ("llama", WHOLE, "float32"), ("llama", BLOCKS, "float32"), ("llama", WHOLE, "bfloat16"), ("llama", BLOCKS, "bfloat16"),
]  # fmt: skip
# `chunked_loss` computes its gradient in the forward pass, which no graph can hold. torch 2.11 stops at the second of these.
IN_THE_LOSS = ("torch.autograd.grad", "requires_grad_()")


def run(machine: Machine, small: bool) -> Iterator[Row]:
    backend = "inductor" if machine.is_gpu else "eager"
    ways: dict[str, Callable[[Step], None]] = {
        WHOLE: lambda step: step.model.compile(backend=backend),
        BLOCKS: lambda step: compile_each(list(step.model.stack.blocks.values()), backend=backend),
    }
    for name, way, precision in CASES[-2:] if small else CASES:
        yield equal(machine, name, replace(family(name, small), num_hidden_layers=2), way, ways[way], precision)
    config, rows, seq = (TINY, 2, 32) if small else (replace(M124, num_hidden_layers=6), 8, 1024)
    for way, compiled in {"eager": lambda step: None, **({} if small else ways)}.items():
        yield speed(machine, config, way, compiled, rows, seq, small)


def equal(machine: Machine, name: str, config: ModelConfig, way: str, compiled: Callable[[Step], None], precision: str) -> Row:
    """The gradients of one step, and what the compiler counted until then, in a second step, and at another batch size."""
    rows, seq = 4, config.max_position_embeddings
    packed = config.architecture == "decoder"
    batches = [moved(batch_of(config, count, seq, packed=packed), machine.device) for count in (rows, rows, rows - 1, rows - 2)]
    eager, step = step_of(config, machine.device, precision), step_of(config, machine.device, precision)
    torch.compiler.reset()
    counters.clear()
    compiled(step)
    eager(batches[0]), step(batches[0])
    far, where = distance(tensors_of(step, gradients=True), tensors_of(eager, gradients=True))
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    step(batches[1])
    again = counters["stats"]["unique_graphs"] - graphs
    step(batches[2]), step(batches[3])
    other = counters["stats"]["unique_graphs"] - graphs - again
    figures = {"difference": far, "worst": where, "graphs": graphs, "graph breaks": breaks, "compiled again": again}
    figures["for two other batch sizes"] = other
    others = [reason.splitlines()[0][:90] for reason in counters["graph_break"] if not any(words in reason for words in IN_THE_LOSS)]
    holds = far <= TOLERANCES[precision] and not others and again == 0 and graphs > 0
    note = f"at most {TOLERANCES[precision]:g}; no breaks but in the loss. {'; '.join(others)}"
    return Row(f"{name}, {way}, {precision}", figures, holds, note)


def speed(machine: Machine, config: ModelConfig, way: str, compiled: Callable[[Step], None], rows: int, seq: int, small: bool) -> Row:
    """The trainer's step in bfloat16, packed rows: the first one, with the compiler's work, and the others."""
    batch = moved(batch_of(config, rows, seq, packed=True), machine.device)
    torch.compiler.reset()
    step = step_of(config, machine.device, "bfloat16", ADAMW)
    compiled(step)
    first = machine.wall_seconds(lambda: step(batch))
    rest = machine.seconds(lambda: step(batch), repeats=1 if small else 10, warmup=0 if small else 3)
    del step
    machine.free()
    figures = {"first step, s": first if machine.is_gpu else None, "ms": rest * 1e3 if machine.is_gpu else None}
    return Row(f"a step of {rows} x {seq} tokens, {way}", figures)
