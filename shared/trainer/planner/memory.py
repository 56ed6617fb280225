"""Chapter 12. Memory of a run by kind and rank: a step's by the formulas of chapters 06 to 10, models kept beside, batches, and rollouts.

`course plan` shows them, and `require_memory` refuses a run that would be out of memory (OOM). A rank has most of its memory in use
either in a training step or while answers are drawn, when there are no gradients and activations, but keys and values of the rows.

Left out on purpose: short-lived buffers other than the loss's (buckets under way), and what the allocator keeps in reserve.
"""

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import psutil
import torch

from shared.course.errors import SettingError
from shared.data.loader import equal_microbatches
from shared.finetune.gguf.packaged import is_gguf
from shared.finetune.config import ALL_LINEAR, AdapterConfig
from shared.finetune.memory_costs import NF4_BITS, FrozenBase, estimate_adapted, packed_bits, sizes_of
from shared.finetune.quantization.rounding import Rounding
from shared.finetune.quantization.packed_settings import KEYS, read_settings
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.hf.files import read_json
from shared.parallel.planning.activations import WIDTH, Part, loss_buffers, model_of_rank
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, part_counts, state_width, unit_bytes
from shared.parallel.planning.pipeline_costs import estimate_ranks, held_parts
from shared.preference.gathering import fits_whole
from shared.trainer.config import TrainerConfig
from shared.trainer.sections import ROLLING
from shared.trainer.weights import find_initial_weights, find_reward_model


def base_bits(config: TrainerConfig) -> float:
    """Bits per weight in the blocks' matrices: 32 for floats. A packed base that does not exist yet is assumed to have the bits and
    groups that `Rounding` has without settings."""
    base = config.adapter.base if config.adapter else "float"
    if base != "packed":
        return NF4_BITS[True] if base == "nf4" else 32.0
    rounding = Rounding()
    if config.start_from is not None and config.start_from.exists() and not is_gguf(config.start_from):
        told = read_json(find_initial_weights(config.start_from).folder / "config.json").get("quantization_config")
        if isinstance(told, dict) and told.get("quant_method") in KEYS:  # or the run refuses it, by its name
            rounding = read_settings(told)[1]
    return packed_bits(rounding.bits, rounding.group)


IDS = 2 * 8  # bytes of a token in a batch: as input and as target


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, by kind; of a pipeline, one for each stage.

    weights, gathered, gradients, optimizer, activations: as `MemoryEstimate` has them. beside: frozen models, a reference or a reward
    model, and a value head. batch: token ids. loss: short-lived buffers while the loss is computed. cache: keys and values of the answers
    that are drawn at a time. drawn_with: extra weight memory while answers are generated: what fsdp gathers, all or block by block, or
    copies for the fused step (`shared.rl.fused_step`). counted: False where there is no formula for all kinds, and the sum is the least.
    """

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float
    beside: float
    batch: float
    loss: float
    cache: float = 0.0
    drawn_with: float = 0.0
    counted: bool = True

    @property
    def training(self) -> float:
        """Bytes in use at once in a training step."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations + self.beside + self.batch + self.loss

    @property
    def drawing(self) -> float:
        """Bytes in use at once during generation."""
        return self.weights + self.optimizer + self.beside + self.cache + self.drawn_with if self.cache else 0.0

    @property
    def peak(self) -> float:
        return max(self.training, self.drawing)


def run_memory(config: TrainerConfig, rewards: ModelConfig | None = None, usable: float = math.inf) -> list[RankMemory]:
    """Memory of each stage of a pipeline, or of every rank, with experts that all have the same load. Of a model without a formula for its
    activations, the weights, gradients and state of one replica alone.

    Args:
        rewards: the shape of a reward model that is kept beside; None to read it from its folder.
        usable: bytes of a rank. Rollouts make no copies of the weights where these have no room in it.
    """
    step, beside = step_sizes(config), kept_beside(config, rewards)
    ids = step.rows * step.microbatches * config.data.seq * IDS
    found, counted = estimates(config, step)
    parts, rolls = held_parts(config.model, config.parallel), config.mode in ROLLING
    drawing = [(cache_bytes(config, part), drawn_with(config, part)) for part in parts] if rolls else [(0.0, 0.0)]
    if len(drawing) != len(found):
        drawing = [max(drawing)] * len(found)
    losses = [loss_bytes(config, step) * (part.head and counted) for part in parts]
    if len(losses) != len(found):
        losses = [max(losses)] * len(found)
    if base_bits(config) < 16 and config.parallel.fully_sharded == 1:  # gathered is one dequantized layer, which is freed before the loss
        losses = [max(0.0, loss - each.gathered) for loss, each in zip(losses, found, strict=True)]
    every = [
        RankMemory(**vars(each), beside=beside, batch=ids, loss=loss, cache=cache, drawn_with=more, counted=counted)
        for each, loss, (cache, more) in zip(found, losses, drawing, strict=True)
    ]
    if copied_bytes(config) and not fits_whole(every[0].drawing, usable):
        every = [replace(each, drawn_with=0.0) for each in every]
    return every


def copies_weights(config: TrainerConfig, usable: float) -> bool:
    """Whether rollouts on ranks with so many usable bytes copy the weights for the fused step. It depends on nothing that changes during a
    run, so that a killed one draws the same answers again."""
    return copied_bytes(config) > 0 and run_memory(config, usable=usable)[0].drawn_with > 0


def with_gathering(config: TrainerConfig, usable: float, rewards: ModelConfig | None = None) -> TrainerConfig:
    """The configuration with `gather` as rollouts choose it on ranks with so many usable bytes; as it is where nothing is chosen."""
    if config.mode not in ROLLING or config.parallel.fully_sharded == 1 or getattr(config, config.mode).gather != "auto":
        return config
    every = run_memory(config, rewards)
    fits = all(fits_whole(each.drawn_with + each.cache, usable - each.weights - each.optimizer - each.beside) for each in every)
    section = replace(getattr(config, config.mode), gather="once" if fits else "block")
    return replace(config, **{config.mode: section})


def estimates(config: TrainerConfig, step: StepSizes) -> tuple[list[MemoryEstimate], bool]:
    """Memory of each stage by formula, and whether the formulas cover all of it."""
    parallel = config.parallel
    if config.model.architecture == "encoder-decoder":  # the least: weights, gradients and state
        counts = parameter_counts(config.model.resolved())
        return [least(config, 0.0 if config.adapter else sum(counts.values()), counts)], False
    if config.adapter:
        return adapted(config, step)
    try:
        return estimate_ranks(config.model, parallel, config.optimizer, step, packed=True), True
    except ValueError:
        model = model_of_rank(config.model, parallel)
        parts = [part_counts(model, held) for held in held_parts(model, parallel)]
        return [least(config, sum(counts.values()), counts) for counts in parts], False


def least(config: TrainerConfig, numbers: float, counts: dict) -> MemoryEstimate:
    """Memory of the weights, gradients and state of so many parameters alone, fully sharded."""
    each = numbers / config.parallel.fully_sharded
    return MemoryEstimate(4 * each, 0.0, 4 * each, state_width(counts, config.optimizer) * each, 0.0)


def adapted(config: TrainerConfig, step: StepSizes) -> tuple[list[MemoryEstimate], bool]:
    """Memory of each stage with an adapter over a frozen base.

    There is no formula for pipelines, context parallelism, experts, selective recomputation and virtual tokens: only the base's weights are
    counted there, so a run that is let through may still not fit.
    """
    adapter, parallel = config.adapter, config.parallel
    bits = base_bits(config)
    try:
        if adapter.kind != "lora":
            raise ValueError("There is no formula for virtual tokens.")
        base = FrozenBase(adapter.rank, set(targets_of(adapter)), bits)
        return [estimate_adapted(config.model.resolved(), parallel, config.optimizer, step, base, packed=True)], True
    except ValueError:
        counts = parameter_counts(model_of_rank(config.model, parallel))
        weights = sum(counts.values()) * bits / 8 / parallel.fully_sharded / parallel.pipeline_parallel
        return [MemoryEstimate(weights, 0.0, 0.0, 0.0, 0.0)] * parallel.pipeline_parallel, False


def targets_of(adapter: AdapterConfig) -> list[str]:
    """Linear layers of a block with a LoRA update, by the last part of their names."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [name for name in names if any(each == ALL_LINEAR or fnmatchcase(name, each.rpartition(".")[2]) for each in adapter.targets)]


def kept_beside(config: TrainerConfig, rewards: ModelConfig | None = None) -> float:
    """Bytes on one rank of the models that a run keeps frozen beside its own, a reference and a reward model, and of a value head with its
    gradient and state."""
    frozen: list[ModelConfig] = [config.model] * keeps_reference(config)
    if setting := reward_model_setting(config):
        frozen.append(rewards or find_reward_model(*setting).model)
    parallel = config.parallel
    numbers = sum(sum(parameter_counts(model_of_rank(model, parallel)).values()) for model in frozen)
    return 4 * numbers / parallel.fully_sharded / parallel.pipeline_parallel + 16 * config.model.hidden_size * (config.mode == "ppo")


def keeps_reference(config: TrainerConfig) -> bool:
    """Whether a frozen reference is kept beside the trained model."""
    compared = {"ppo": True, "dpo": config.dpo.reference == "beside", "grpo": config.grpo.reference}
    return config.adapter is None and bool(compared.get(config.mode))


def reward_model_setting(config: TrainerConfig) -> tuple | None:
    """The folder of the run's reward model, and the setting that names it; None without one."""
    if config.mode == "ppo" and config.ppo.reward == "model":
        return config.ppo.reward_model, "ppo.reward_model"
    if config.mode == "grpo" and config.grpo.reward_model:
        return config.grpo.reward_model, "grpo.rewards"
    return None


def loss_bytes(config: TrainerConfig, step: StepSizes) -> float:
    """Short-lived buffers of the loss, whose chunks of logits and copies of the head come beside the activations."""
    tokens = step.rows * step.seq // config.parallel.context_parallel
    return loss_buffers(config.model.resolved(), config.parallel, tokens, WIDTH[step.precision], trained=config.adapter is None)


def cache_bytes(config: TrainerConfig, part: Part) -> float:
    """KV cache of the answers that a rank generates at a time, at their maximal length."""
    sizes, parallel = getattr(config, config.mode), config.parallel
    own, rows = model_of_rank(config.model, parallel), min(sizes.rows, sizes.prompts * sizes.answers // parallel.data_ranks)
    width = WIDTH[step_sizes(config).precision]
    return rows * config.data.seq * 2 * own.num_key_value_heads * own.head_dim * part.layers * width


def copied_bytes(config: TrainerConfig) -> float:
    """Copies of all matrices in the dtype of products, which the fused step makes of a plain model's; 0 for other models."""
    parallel, model, adapter = config.parallel, config.model.resolved(), config.adapter
    whole = parallel.tensor_parallel * parallel.pipeline_parallel * parallel.fully_sharded == 1
    floats = adapter is None or (adapter.kind, adapter.base) == ("lora", "float")
    if not whole or not floats or model.experts is not None or model.architecture != "decoder" or model.norm_position != "pre":
        return 0.0
    block = sum(out * into for out, into in sizes_of(model).values())
    return WIDTH[step_sizes(config).precision] * (model.num_hidden_layers * block + model.vocab_size * model.hidden_size)


def drawn_with(config: TrainerConfig, part: Part) -> float:
    """Copies for the fused step, or weights that fsdp gathers while answers are drawn: all of them, or with `gather: block` the ends and a
    block, and those that are fetched ahead. Of a frozen base in few bits no formula says how much is gathered: it counts as if it had the
    precision of products."""
    parallel = config.parallel
    if parallel.fully_sharded == 1:
        return copied_bytes(config)
    root, blocks = unit_bytes(model_of_rank(config.model, parallel), part, parallel, WIDTH[step_sizes(config).precision])
    chunk = -(-part.layers // parallel.pipeline_chunks)  # never a block of another chunk
    by_block = getattr(config, config.mode).gather == "block"
    return root + sum(blocks[-min(1 + parallel.prefetch, chunk) :] if by_block else blocks)


def step_sizes(config: TrainerConfig) -> StepSizes:
    """A rank's step, as the formulas of `shared.parallel.planning` take it. Answers count as if all were as long as they may be."""
    precision = "float32" if config.precision == "auto" else config.precision
    rows, ranks = config.data.micro_batch_size, config.parallel.data_ranks
    if config.mode in ROLLING:
        return StepSizes(rows, config.data.seq, max(-(-rows_of_answers(config) // (ranks * rows)), 1), precision)
    microbatches, rows = equal_microbatches(config.data.batch_size, rows, ranks)
    return StepSizes(rows, config.data.seq, microbatches, precision)


def rows_of_answers(config: TrainerConfig) -> int:
    """Rows of a step with rollouts, over all ranks: one per answer, since a prompt may fill a row."""
    sizes = getattr(config, config.mode)
    return -(-sizes.prompts * sizes.answers // sizes.minibatches)


def require_memory(config: TrainerConfig, device: torch.device) -> None:
    """Refuse a run whose weights, gradients, optimizer state and activations, by formula, are more than the device has in all.

    What other programs hold is not counted, and a CPU's swap space is: only what is hopeless is refused.

    Raises:
        SettingError: says how many GiB a rank needs, how many there are, and which settings decide.
    """
    there = memory_of(device)
    needed = memory_needed(with_gathering(config, there), there)
    if needed > there:
        raise SettingError(
            f"This model does not fit into memory: a rank needs about {needed / 2**30:,.0f} GiB and {device} has {there / 2**30:,.0f}. "
            "Make model.hidden_size, model.num_hidden_layers, data.prepare.vocab_size, data.seq, data.micro_batch_size or data.batch_size "
            "smaller."
        )


def memory_needed(config: TrainerConfig, usable: float = math.inf) -> float:
    """Bytes of the rank that has most, of `usable` ones (`shared.trainer.planner.memory`)."""
    return max(each.peak for each in run_memory(config, usable=usable))


def memory_of(device: torch.device) -> int:
    """Total memory of a device, bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total + psutil.swap_memory().total
