"""Chapter 05. Mixed precision with autocast: matrix products in 16 bits, weights and sums in 32 bits.

The weights stay in float32, and autocast rounds copies of them for each product. An update smaller than a weight's last digit would be lost
in a 16-bit weight: bfloat16 has 8 significant bits, so 1 + 0.003 is 1 (Micikevicius et al. 2018, section 3.1, "master weights").

Left out on purpose: 8-bit floating point, and weights that are stored in 16 bits.
"""

import torch
from torch import nn

from shared.optim.config import Precision
from shared.totals import Batch, Objective, Totals


def autocast_objective(objective: Objective, precision: Precision) -> Objective:
    """Wrap an objective in autocast, so that its matrix products are computed in `precision`; float32 returns it unchanged.

    float16 needs a loss scale (`shared.optim.loss_scale`).

    Raises, at each call of the returned objective:
        ValueError: a trainable parameter is not float32: its updates would be rounded away.
    """
    if precision == "float32":
        return objective
    if precision not in ("bfloat16", "float16"):
        raise ValueError(f"There is no precision {precision!r}: choose float32, bfloat16 or float16.")
    dtype = getattr(torch, precision)

    def in_autocast(model: nn.Module, batch: Batch) -> Totals:
        require_master_weights(model)
        with torch.autocast(next(model.parameters()).device.type, dtype):
            return objective(model, batch)

    return in_autocast


def require_master_weights(model: nn.Module) -> None:
    """Require float32 master weights: refuse to train weights that are stored in 16 bits."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} is stored in {str(parameter.dtype).removeprefix('torch.')}, where a small update is rounded away: keep "
                "trained weights in float32 (model.float()); autocast rounds copies of them."
            )
