"""Chapter 12. Out of memory (OOM) before it happens: a run that cannot fit into the device's memory is refused, with both numbers."""

import psutil
import torch

from shared.course.errors import SettingError
from shared.parallel.planning.activations import model_of_rank
from shared.parallel.planning.memory import StepSizes, part_counts, state_width
from shared.parallel.planning.pipeline_costs import estimate_ranks, held_parts
from shared.trainer.config import TrainerConfig

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
    share = config.data.batch_size // config.parallel.data_ranks
    try:
        held = max(each.total for each in estimate_ranks(config.model, config.parallel, config.optimizer, step_sizes(config), packed=True))
    except ValueError:
        model = model_of_rank(config.model, config.parallel)
        counts = [part_counts(model, held) for held in held_parts(model, config.parallel)]
        held = max(sum(each.values()) * (8 + state_width(each, config.optimizer)) for each in counts) / config.parallel.fully_sharded
    return held + share * config.data.seq * IDS


def step_sizes(config: TrainerConfig) -> StepSizes:
    """A rank's step, as the formulas of `shared.parallel.planning` take it."""
    share = config.data.batch_size // config.parallel.data_ranks
    rows = min(config.data.micro_batch_size, share)
    precision = "float32" if config.precision == "auto" else config.precision
    return StepSizes(rows, config.data.seq, share // rows, precision)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total + psutil.swap_memory().total
