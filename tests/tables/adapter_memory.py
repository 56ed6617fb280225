"""Bytes that a rank holds while adapters are trained, measured beside the formulas; and the tables of chapter 10's MEMORY.md.

python tests/tables/adapter_memory.py
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
from memory_table import ADAMW, cell, memory_measured  # noqa: E402
from storage_peak import StoragePeak  # noqa: E402

from shared.finetune.adapters import attach_adapter  # noqa: E402
from shared.finetune.config import AdapterConfig  # noqa: E402
from shared.finetune.memory_costs import NF4_BITS, FrozenBase, dequantized_bytes, estimate_adapted  # noqa: E402
from shared.finetune.quantization.nf4_linear import quantize_base  # noqa: E402
from shared.loop import accumulate_gradients, train_step  # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.counting import parameter_counts  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.optim.updater import Update  # noqa: E402
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.parallelize import apply_parallel  # noqa: E402
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, estimate_memory  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402

SMALL = ModelConfig(vocab_size=509, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
WIDER = ModelConfig(vocab_size=2048, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1536)
STEP = StepSizes(3, 48, 1)
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASES = {"LoRA, float32": 32, "LoRA, bfloat16": 16, "QLoRA": NF4_BITS[True]}
KINDS = ("weights", "gradients", "optimizer", "activations")


def model_with(base: FrozenBase | None, config: ModelConfig) -> TransformerModel:
    """A model with adapters over a base in so many bits; without a base, one that is trained whole."""
    model = TransformerModel(config)
    if base is None:
        return model
    if base.is_quantized:
        quantize_base(model)
    attach_adapter(model, AdapterConfig(rank=base.rank, targets=tuple(base.targets)))
    if base.bits == 16:
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.data = parameter.data.bfloat16()
    return model


def batches_of(config: ModelConfig, step: StepSizes) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(config.vocab_size, (step.microbatches, step.rows, step.seq + 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each[:, :-1].contiguous(), "targets": each[:, 1:].contiguous()} for each in ids]


class Run:
    """A rank's step."""

    def __init__(self, world: Communicator, layout: ParallelConfig, config: ModelConfig, step: StepSizes, base: FrozenBase | None):
        dtype = None if step.precision == "float32" else torch.bfloat16
        self.parallel = apply_parallel(model_with(base, config), Mesh(layout, world), ADAMW, dtype, axes=RUN_AXES)
        self.stepper = build_optimizer(self.parallel.optim_params, ADAMW, self.parallel.routes)
        self.objective = self.parallel.objective(autocast_objective(packed_next_token_objective, step.precision))
        self.runner = self.parallel.runner(accumulate_gradients)
        self.updater = self.parallel.updater(Update(1.0, norm=self.parallel.grad_norm))
        self.batches = batches_of(config, step)

    def train(self) -> None:
        model, reducer = self.parallel.model, self.parallel.reducer
        train_step(model, self.stepper, self.batches, self.objective, self.runner, reducer, self.updater)


def measure(world: Communicator, *arguments) -> MemoryEstimate:
    """By kind, of a rank's first step."""
    run = Run(world, *arguments)
    with memory_measured.MemoryTracker(run.parallel, run.stepper) as meter:
        run.train()
    return meter.peak


def by_kind(word: str, base: FrozenBase, precision: str, config: ModelConfig = SMALL, how: str = "none") -> dict[str, tuple[float, float]]:
    """Predicted, and measured on the rank that is farthest from it."""
    layout, step = replace(parse_layout(word), activation_checkpointing=how), replace(STEP, precision=precision)
    predicted = estimate_adapted(config, layout, ADAMW, step, base)
    arguments = (layout, config, step, base)
    found = [measure(SingleRankCommunicator(), *arguments)] if layout.ranks == 1 else run_threads(measure, layout.ranks, *arguments)
    kinds = {}
    for kind in KINDS:
        expected = getattr(predicted, kind)
        kinds[kind] = expected, max((getattr(each, kind) for each in found), key=lambda value: abs(value - expected))  # noqa: B023
    return kinds


def peak_of_step(base: FrozenBase | None, step: StepSizes, config: ModelConfig = WIDER, how: str = "none") -> int:
    """The most bytes of tensors at once in a later step of one process, as operations see them; batch included."""
    run = Run(SingleRankCommunicator(), ParallelConfig(activation_checkpointing=how), config, step, base)
    run.train()
    held = [*run.parallel.model.parameters(), *(value for state in run.stepper.state.values() for value in state.values())]
    with StoragePeak() as memory:
        for tensor in held:
            tensor.detach()
        run.train()
    return memory.peak


def predicted(base: FrozenBase | None, step: StepSizes, config: ModelConfig, layout: ParallelConfig) -> MemoryEstimate:
    return estimate_memory(config, layout, ADAMW, step) if base is None else estimate_adapted(config, layout, ADAMW, step, base)


# The tables.

PEAKS = StepSizes(2, 256, 1, "bfloat16")
WAYS = {"full fine-tuning": None} | {name: FrozenBase(16, EVERY, bits) for name, bits in BASES.items()}
CARD = 24 * 2**30
USABLE = 0.9 * CARD  # a tenth for what formulas leave out: the allocator's reserve, the driver's own memory, short-lived buffers
LONG = StepSizes(1, 2048, 1, "bfloat16")
LAYOUTS = ("one", "fsdp2", "tp2_sp")


def shape(size: int, layers: int, heads: int, shared: int, width: int, vocab: int, **more) -> ModelConfig:
    return ModelConfig(vocab, size, layers, heads, num_key_value_heads=shared, intermediate_size=width, **more)


PUBLISHED = {
    "Qwen2.5-0.5B": shape(896, 24, 14, 2, 4864, 151_936, tie_word_embeddings=True, attention_bias=True),
    "Llama-3.2-1B": shape(2048, 16, 32, 8, 8192, 128_256, tie_word_embeddings=True),
    "Llama-3.2-3B": shape(3072, 28, 24, 8, 8192, 128_256, tie_word_embeddings=True),
    "Mistral-7B": shape(4096, 32, 32, 8, 14_336, 32_000),
    "Llama-3.1-8B": shape(4096, 32, 32, 8, 14_336, 128_256),
    "Qwen2.5-14B": shape(5120, 48, 40, 8, 13_824, 152_064, attention_bias=True),
    "Qwen2.5-32B": shape(5120, 64, 40, 8, 27_648, 152_064, attention_bias=True),
    "Llama-2-70B": shape(8192, 80, 64, 8, 28_672, 32_000),
    "Llama-3.1-70B": shape(8192, 80, 64, 8, 28_672, 128_256),
}
"""Sizes follow the published configurations."""


def kinds_table() -> Iterator[str]:
    """Bytes of a rank by kind, predicted / measured."""
    yield f"| layout | base | {' | '.join(KINDS)} |"
    yield "|" + "---|" * (2 + len(KINDS))
    for word in ("one", "dp2_zero1", "fsdp2", "tp2"):
        for name, bits in BASES.items():
            kinds = by_kind(word, FrozenBase(4, EVERY, bits), "bfloat16")
            yield f"| {word} | {name} | {' | '.join(cell(*kinds[kind]) for kind in KINDS)} |"


def peaks_table() -> Iterator[str]:
    """The peak of a step in MB."""
    yield "| trained | recomputed | bytes a weight of the blocks' matrices | measured | by formula |"
    yield "|---|---|---|---|---|"
    for how, recomputed in (("none", "no"), ("full", "blocks")):
        for name, base in WAYS.items():
            measured, layout = peak_of_step(base, PEAKS, how=how), ParallelConfig(activation_checkpointing=how)
            needs = predicted(base, PEAKS, WIDER, layout).total
            each = "16" if base is None else f"{base.bits / 8:.3g}"
            yield f"| {name} | {recomputed} | {each} | {measured / 1e6:.1f} | {needs / 1e6:.1f} |"


def needed(model: ModelConfig, base: FrozenBase | None, word: str) -> float:
    """Bytes on a card, with blocks that are recomputed."""
    return predicted(base, LONG, model, replace(parse_layout(word), activation_checkpointing="full")).total


def fits_table() -> Iterator[str]:
    """GB on a card; in bold what fits."""
    ways = {name: base for name, base in WAYS.items() if name != "LoRA, float32"}
    titles = [f"{name}, {word}" for word in LAYOUTS for name in ways]
    yield f"| model | weights | {' | '.join(titles)} |"
    yield "|" + "---|" * (2 + len(titles))
    for name, model in PUBLISHED.items():
        cells = []
        for word in LAYOUTS:
            for base in ways.values():
                needs = needed(model, base, word)
                cells.append(f"**{needs / 1e9:.1f}**" if needs <= USABLE else f"{needs / 1e9:.1f}")
        yield f"| {name} | {sum(parameter_counts(model).values()) / 1e9:.2f} billion | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for title, table in (("## What a rank holds", kinds_table), ("## The peak of a step", peaks_table), ("## What fits", fits_table)):
        print(title, *table(), sep="\n", end="\n\n", flush=True)
