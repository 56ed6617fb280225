"""Chapter 12. Which precision pays on this machine: bfloat16 where its matrix products are faster than float32's.

A GPU since Ampere multiplies bfloat16 many times faster. A CPU does so only with instructions of its own (AMX, AVX512-BF16), and is
slower without, so there it is measured.
"""

import torch

from shared.engine.metrics.peaks import measure_peak
from shared.optim.precision import Precision

WORTH = 1.3  # times faster, before the casts that autocast adds are paid for


def resolve_precision(asked: str, device: torch.device) -> Precision:
    """`asked`, or for "auto" the faster of bfloat16 and float32 on this device."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type != "cpu":
        return "float32"
    return "bfloat16" if measure_peak(torch.bfloat16) > WORTH * measure_peak(torch.float32) else "float32"
