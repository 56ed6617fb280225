"""Chapter 12. Out of memory (OOM) before it happens: a run that cannot fit into the device's memory is refused, with both numbers."""

from fnmatch import fnmatchcase

import psutil
import torch

from shared.course.errors import SettingError
from shared.data.loader import equal_microbatches
from shared.finetune.config import ALL_LINEAR
from shared.model.counting import parameter_counts
from shared.moe.config import MixtureModelConfig
from shared.parallel.planning.activations import model_of_rank
from shared.parallel.planning.frozen_costs import NF4_BITS, FrozenBase, estimate_adapted
from shared.parallel.planning.memory import StepSizes, part_counts, state_width
from shared.parallel.planning.pipeline_costs import estimate_ranks, held_parts
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import find_reward_model

IDS = 2 * 8  # bytes of a token in a batch: as input and as target


def require_memory(config: TrainerConfig, device: torch.device) -> None:
    """Refuse a run whose weights, gradients, optimizer state and activations, by formula, are more than the device has in all.

    What other programs hold is not counted, and a CPU's swap space is: only what is hopeless is refused.

    Raises:
        SettingError: says how many GiB a rank needs, how many there are, and which settings decide.
    """
    needed, there = memory_needed(config), memory_of(device)
    if needed > there:
        raise SettingError(
            f"This model does not fit into memory: a rank needs about {needed / 2**30:,.0f} GiB and {device} has {there / 2**30:,.0f}. "
            "Make model.hidden_size, model.num_hidden_layers, data.prepare.vocab_size, data.seq, data.micro_batch_size or data.batch_size "
            "smaller."
        )


def memory_needed(config: TrainerConfig) -> float:
    """Bytes on one rank, with experts that all have the same load. Of a model without a formula for its activations, the weights, gradients
    and state of one replica alone."""
    share = -(-config.data.batch_size // config.parallel.data_ranks)
    beside = kept_beside(config)
    if config.model.architecture == "encoder-decoder":  # the least: weights, gradients and state
        counts = parameter_counts(config.model.resolved())
        return 0.0 if config.adapter else sum(counts.values()) * (8 + state_width(counts, config.optimizer)) / config.parallel.fully_sharded
    if config.adapter:
        return adapted_memory(config) + beside + share * config.data.seq * IDS
    try:
        held = max(each.total for each in estimate_ranks(config.model, config.parallel, config.optimizer, step_sizes(config), packed=True))
    except ValueError:
        model = model_of_rank(config.model, config.parallel)
        counts = [part_counts(model, held) for held in held_parts(model, config.parallel)]
        held = max(sum(each.values()) * (8 + state_width(each, config.optimizer)) for each in counts) / config.parallel.fully_sharded
    return held + beside + share * config.data.seq * IDS


def kept_beside(config: TrainerConfig) -> float:
    """Bytes on one rank of the models that a run keeps frozen beside its own, a reference and a reward model, and of a value head with its
    gradient and state."""
    frozen: list[MixtureModelConfig] = []
    compared = {"ppo": True, "dpo": config.dpo.reference == "beside", "grpo": config.grpo.reference}
    if config.adapter is None and compared.get(config.mode):
        frozen.append(config.model)
    if config.mode == "ppo" and config.ppo.reward == "model":
        frozen.append(find_reward_model(config.ppo.reward_model, "ppo.reward_model").model)
    if config.mode == "grpo" and config.grpo.reward_model:
        frozen.append(find_reward_model(config.grpo.reward_model, "grpo.rewards").model)
    parallel = config.parallel
    numbers = sum(sum(parameter_counts(model_of_rank(model, parallel)).values()) for model in frozen)
    return 4 * numbers / parallel.fully_sharded / parallel.pipeline_parallel + 16 * config.model.hidden_size * (config.mode == "ppo")


def adapted_memory(config: TrainerConfig) -> float:
    """The same over a frozen base.

    There is no formula for pipelines, context parallelism, experts, selective recomputation and virtual tokens: only the base's weights are
    counted there, so a run that is let through may still not fit.
    """
    adapter, bits = config.adapter, NF4_BITS[True] if config.adapter.base == "nf4" else 32.0
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    targets = [name for name in names for each in adapter.targets if each == ALL_LINEAR or fnmatchcase(name, each.rpartition(".")[2])]
    try:
        if adapter.kind != "lora":
            raise ValueError("There is no formula for virtual tokens.")
        base = FrozenBase(adapter.rank, {*targets}, bits)
        return estimate_adapted(config.model.resolved(), config.parallel, config.optimizer, step_sizes(config), base, packed=True).total
    except ValueError:
        counts, parallel = parameter_counts(model_of_rank(config.model, config.parallel)), config.parallel
        return sum(counts.values()) * bits / 8 / parallel.fully_sharded / parallel.pipeline_parallel


def step_sizes(config: TrainerConfig) -> StepSizes:
    """A rank's step, as the formulas of `shared.parallel.planning` take it."""
    microbatches, rows = equal_microbatches(config.data.batch_size, config.data.micro_batch_size, config.parallel.data_ranks)
    precision = "float32" if config.precision == "auto" else config.precision
    return StepSizes(rows, config.data.seq, microbatches, precision)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total + psutil.swap_memory().total
