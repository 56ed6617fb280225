"""Chapter 12. Out of memory (OOM) before it happens: a run that cannot fit into the device's memory is refused, with both numbers."""

import math

import psutil
import torch

from shared.course.errors import SettingError
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.memory import run_memory, with_gathering


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
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total + psutil.swap_memory().total
