"""Chapter 09. Gradient norm and weight norm of every expert: an expert that starves has a small gradient long before its load is 0.

An expert counts with all its matrices. Where its weights are spread over ranks, each rank adds the squares that it holds to the expert's
sum, by the expert's number in the whole model.

Left out on purpose: norms of routers, which the norms by role have among the matrices.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shared.engine.callbacks import Callback, Metrics
from shared.engine.run_state import RunState
from shared.model.config import ModelConfig
from shared.model.roles import experts_of, role_of


class ExpertNorms(Callback):
    """Norms of each expert, in the steps that are logged and in no others, in one all-reduce.

    Args:
        config: the model's, whole: every rank must name the experts of all blocks.
        loss_scale: loss_scale() -> what multiplies the gradients before the optimizer's step (chapter 05); None for 1.

    Metrics: `experts/gradient/BLOCK.EXPERT`, of the mean loss, before any clipping; `experts/weight/BLOCK.EXPERT`, before the step.
    """

    every_rank = True

    def __init__(self, config: ModelConfig, loss_scale: Callable[[], float] | None = None):
        experts = config.experts
        blocks = [block for block in range(config.num_hidden_layers) if experts.is_sparse(block)]
        self.places = [f"{block}.{expert}" for block in blocks for expert in range(experts.num_experts)]
        self.loss_scale = loss_scale
        self.measured: dict[str, Tensor] = {}

    def before_optimizer(self, engine: RunState) -> None:
        if not engine.log_due:
            return
        groups: dict[str, dict[str, Tensor]] = {f"{what}/{place}": {} for what in ("gradient", "weight") for place in self.places}
        for name, parameter in engine.strategy.grad_params.named_parameters():
            if role_of(name, parameter) != "expert":
                continue
            block = name.split("blocks.")[1].split(".")[0]
            for what, tensor in (("gradient", parameter.grad), ("weight", parameter.detach())):
                for expert, part in () if tensor is None else experts_of(parameter, tensor):
                    groups[f"{what}/{block}.{expert}"][name] = part
        divisor = engine.token_count * (self.loss_scale() if self.loss_scale else 1)
        norms = engine.strategy.norms(groups)
        self.measured = {f"experts/{key}": norm / (divisor if key.startswith("gradient") else 1) for key, norm in norms.items()}

    def measure(self, engine: RunState) -> Metrics:
        """Everything is fetched from the device at once, after the step."""
        if not self.measured:
            return {}
        values = torch.stack([value.float() for value in self.measured.values()]).tolist()
        metrics, self.measured = dict(zip(self.measured, values, strict=True)), {}
        return metrics
