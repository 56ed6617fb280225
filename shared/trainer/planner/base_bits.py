"""Chapter 12. Bits of a weight of an adapter's frozen base, by the configuration and by the folder in start_from."""

from shared.finetune.memory_costs import NF4_BITS, packed_bits
from shared.finetune.quantization.rounding import Rounding
from shared.finetune.quantization.saved import KEYS, read_settings
from shared.model.hf.files import read_json
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import find_initial_weights


def base_bits(config: TrainerConfig) -> float:
    """Of a weight in the blocks' matrices: 32 where they are floats. A packed base that is not there yet is taken to have the bits and
    groups that `Rounding` has without settings."""
    base = config.adapter.base if config.adapter else "float"
    if base != "packed":
        return NF4_BITS[True] if base == "nf4" else 32.0
    rounding = Rounding()
    if config.start_from is not None and config.start_from.exists():
        told = read_json(find_initial_weights(config.start_from).folder / "config.json").get("quantization_config")
        if isinstance(told, dict) and told.get("quant_method") in KEYS:  # or the run refuses it, by its name
            rounding = read_settings(told)[1]
    return packed_bits(rounding.bits, rounding.group)
