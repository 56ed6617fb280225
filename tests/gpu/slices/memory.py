"""Peak memory of the 24 GB configurations, in a process that may use no more than such a card has, beside the estimate by formula.

The rows are variants of chapters/12_grpo/two_3090s.yaml: a rank's micro-batch of the 124-million model in packed rows. Two micro-batches
make a step, since gradients are complete while the second one's activations are still there. An allocator has rounding and blocks that it
keeps; the formula leaves out short-lived buffers but those of the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from gpu_machine import GIB, Machine
from gpu_models import M124, TINY, batch_of, moved, step_of
from gpu_rows import Row

from shared.model.config import ModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.planning.activations import WIDTH, loss_buffers
from shared.parallel.planning.memory import StepSizes, estimate_memory

ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as chapters/12_grpo/train.py sets it
CARD = 23.5  # GiB that a card of 24 GB reports to a program, at least
FORMULA = 0.25  # by how much the measured peak of tensors may differ from the estimate


@dataclass(frozen=True)
class Variant:
    """rows: of a micro-batch of 1,024 tokens each. must_fit: whether the course says that it fits."""

    rows: int = 16
    optimizer: str = "muon"
    recompute: str = "none"
    precision: str = "bfloat16"
    model: ModelConfig = M124
    compiled: bool = False
    must_fit: bool = True


LARGE = replace(M124, hidden_size=1280, num_hidden_layers=24, num_attention_heads=20, num_key_value_heads=20, intermediate_size=3456)
VARIANTS = {
    "two_3090s.yaml": Variant(),
    "two_3090s.yaml, compiled as it says": Variant(compiled=True),
    "optimizer adamw": Variant(optimizer="adamw"),
    "float32": Variant(precision="float32"),
    "float16": Variant(precision="float16"),
    "micro-batch of 32": Variant(rows=32),
    "micro-batch of 64": Variant(rows=64, must_fit=False),
    "micro-batch of 64, recomputed": Variant(rows=64, recompute="full"),
    "micro-batch of 32, recomputed selectively": Variant(rows=32, recompute="selective"),
    "0.5 billion, recomputed": Variant(rows=8, recompute="full", model=LARGE),
}


def run(machine: Machine, small: bool) -> Iterator[Row]:
    for name, variant in VARIANTS.items():
        if small:
            if variant.compiled:
                continue  # the compile slice starts the compiler
            variant = replace(variant, rows=2, model=TINY)
        with machine.as_card_of(CARD) as limited:
            yield measured(machine, name, variant, 32 if small else 1024, limited)
        machine.free()


def measured(machine: Machine, name: str, variant: Variant, seq: int, limited: bool) -> Row:
    optimizer = OptimizerConfig(variant.optimizer, lr=1e-3)
    layout = replace(ParallelConfig(), activation_checkpointing=variant.recompute)
    estimate = estimate_memory(variant.model, layout, optimizer, StepSizes(variant.rows, seq, 2, variant.precision), packed=True)
    buffers = loss_buffers(variant.model, layout, variant.rows * seq, WIDTH[variant.precision])
    foreseen = (estimate.total + buffers) / GIB
    figures = {"estimate GiB": foreseen, "allocated": None, "reserved": None, "estimate, of allocated": None}
    note = f"in {CARD:g} GiB, within {FORMULA:.0%} of the estimate"
    if machine.is_gpu and not limited:
        note = f"this card is smaller than {CARD:g} GiB"
    try:
        allocated, reserved = machine.peak_gib(lambda: two_steps(machine, variant, optimizer, seq))
    except torch.OutOfMemoryError as error:
        says = str(error).split(". ")[0]
        return Row(name, figures, None if not variant.must_fit else False, f"does not fit in {CARD:g} GiB: {says}")
    if allocated is None:
        return Row(name, figures, None, note)
    figures |= {"allocated": allocated, "reserved": reserved, "estimate, of allocated": foreseen / allocated}
    close = variant.compiled or abs(figures["estimate, of allocated"] - 1) <= FORMULA
    return Row(name, figures, limited and close if variant.must_fit else None, note)


def two_steps(machine: Machine, variant: Variant, optimizer: OptimizerConfig, seq: int) -> None:
    """The second step has all the optimizer's state from its beginning."""
    step = step_of(variant.model, machine.device, variant.precision, optimizer)
    apply_activation_checkpointing(step.model, variant.recompute)
    if variant.compiled:
        step.model.compile()
    batches = [moved(batch_of(variant.model, variant.rows, seq, seed=seed, packed=True), machine.device) for seed in range(2)]
    for _ in range(2):
        step(*batches)
