"""Chapter 12. `plan_run`: what a run holds, sends, computes and takes on given hardware, from its configuration alone.

Everything is put together from the formulas that the chapters built and tested: memory (`shared.trainer.planner.memory`), traffic
(`traffic`), FLOPs (`flops`) and time (`seconds`). Nothing is built, read or downloaded.
"""

from dataclasses import dataclass, replace

import torch

from shared.finetune.memory_costs import FrozenBase, adapter_size
from shared.model.config import ModelConfig
from shared.model.counting import active_feed_forward_size, feed_forward_counts, parameter_counts
from shared.parallel.config import layout_name
from shared.parallel.planning.activations import whole_of
from shared.trainer.config import TrainerConfig
from shared.trainer.models import resolve_precision
from shared.trainer.planner.flops import Trained, part_flops
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.memory import RankMemory, run_memory, step_sizes, targets_of, with_gathering
from shared.trainer.planner.seconds import StepSeconds, step_seconds
from shared.trainer.planner.traffic import Sent, stage_traffic
from shared.trainer.sections import ROLLING


@dataclass(frozen=True)
class Parameters:
    """total: of the model. active: that a token passes. trained: that the optimizer steps."""

    total: int
    active: int
    trained: int


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a run.

    memory, traffic: of each stage of a pipeline, or of every rank. usable: bytes that a rank may have. tokens: positions of a step,
    over all ranks; of rollouts, where all answers are as long as they may be. flops: that a step needs, over all ranks, without
    recomputation. peak: FLOP/s of all ranks together.
    """

    mode: str
    layout: str
    hardware: str
    ranks: int
    precision: str
    recompute: str
    parameters: Parameters
    memory: tuple[RankMemory, ...]
    usable: float
    traffic: tuple[tuple[Sent, ...], ...]
    tokens: int
    flops: float
    peak: float
    seconds: StepSeconds
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> RankMemory:
        """Memory of the rank that has most."""
        return max(self.memory, key=lambda each: each.peak)

    @property
    def fits(self) -> bool:
        return self.held.peak <= self.usable

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the training steps, without the drawing and scoring of answers."""
        seconds = self.seconds
        return self.flops / (seconds.total - seconds.drawing - seconds.scoring) / self.peak

    @property
    def hours(self) -> float:
        return self.steps * self.seconds.total / 3600

    @property
    def limit(self) -> str:
        """What takes most of a step; memory where the run does not fit."""
        parts = self.seconds.parts
        return max(parts, key=parts.__getitem__) if self.fits else "memory"


def plan_run(config: TrainerConfig, hardware: Hardware, rewards: ModelConfig | None = None) -> Plan:
    """Plan a run.

    Args:
        config: with the vocabulary's size in `model`.
        hardware: as a whole (`parse_hardware`).
        rewards: the shape of a reward model that is not there yet; None to read it where the run asks one.

    Raises:
        SettingError: more ranks than cards.
        ValueError: a model for which there are no formulas of traffic or FLOPs: anything but a decoder.
    """
    if config.model.architecture != "decoder":
        raise ValueError(f"The model is an {config.model.architecture}, and the formulas are those of a decoder: run a few steps instead.")
    layout, model = config.parallel, config.model.resolved()
    own = hardware.shared_by(layout.ranks)
    config = with_gathering(replace(config, precision=precision_on(config, own)), own.usable, rewards)
    step, trained = step_sizes(config), trained_of(config)
    traffic = tuple(tuple(stage_traffic(config, own, step, trained, stage)) for stage in range(layout.pipeline_parallel))
    seconds = step_seconds(config, own, step, trained, [list(each) for each in traffic])
    tokens = step.rows * step.microbatches * step.seq * layout.data_ranks
    flops = part_flops(model, whole_of(model), step.seq, trained, recompute=False).needed * tokens
    memory = tuple(run_memory(config, rewards, own.usable))
    return Plan(
        config.mode, layout_name(layout), hardware.name, layout.ranks, step.precision, layout.activation_checkpointing,
        parameters_of(config, trained), memory, own.usable, traffic, tokens, flops, layout.ranks * own.peak(step.precision), seconds,
        config.steps, tuple(notes(config, memory)),
    )  # fmt: skip


def precision_on(config: TrainerConfig, hardware: Hardware) -> str:
    """What auto means there."""
    if config.precision != "auto":
        return config.precision
    return resolve_precision("auto", torch.device("cpu")) if hardware.is_cpu else "bfloat16"


def trained_of(config: TrainerConfig) -> Trained:
    if config.adapter is None or config.adapter.kind != "lora":
        return Trained()
    return Trained(config.adapter.rank, tuple(targets_of(config.adapter)))


def parameters_of(config: TrainerConfig, trained: Trained) -> Parameters:
    model = config.model.resolved()
    counts = parameter_counts(model)
    total = sum(counts.values())
    layers = range(model.num_hidden_layers)
    unused = sum(sum(feed_forward_counts(model, layer).get(role, 0) for role in ("matrix", "expert")) for layer in layers)
    active = total - unused + sum(active_feed_forward_size(model, layer) for layer in layers)
    if not trained.is_adapter:
        return Parameters(total, active, total)
    updates = model.num_hidden_layers * adapter_size(model, base_of(trained))
    return Parameters(total, active, updates)


def base_of(trained: Trained) -> FrozenBase:
    return FrozenBase(trained.rank, trained.targets)


def notes(config: TrainerConfig, memory: tuple[RankMemory, ...]) -> list[str]:
    """What was assumed, or left out."""
    layout, found = config.parallel, []
    if not all(each.counted for each in memory):
        found.append("There is no formula for all memory of this model, adapter or layout: what is shown is the least.")
    if config.mode in ROLLING:
        found.append("Prompts and answers are taken to be as long as they may be: a row for each answer.")
        found.append("The time to start kernels is left out, which rules where one token of each answer is computed at a time.")
    if config.mode in ROLLING and layout.fully_sharded > 1 and getattr(config, config.mode).gather == "block":
        found.append("Weights are gathered block by block for each token of an answer, and the time of that is left out.")
    if config.mode == "dpo" and config.dpo.needs_reference and config.dpo.reference == "cached":
        found.append("The reference's pass is counted for the pairs that the steps see; it runs over all pairs, before the first step.")
    if config.model.experts is not None:
        found.append("Experts are taken to get equally many rows.")
    if layout.backend == "torch":
        found.append("Traffic is that of backend course.")
    if layout.offload_optimizer:
        found.append("The optimizer's state is counted on the card, though parallel.offload_optimizer keeps it in the CPU's memory.")
    if config.adapter and config.adapter.kind != "lora":
        found.append("The FLOPs are those of full fine-tuning.")
    return found
