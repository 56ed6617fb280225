"""Chapter 09. Auxiliary-loss-free load balancing (Wang et al. 2024, DeepSeek-V3), and the experts' load and norms as metrics.

Once a step, from the choices of all its micro-batches on all ranks:

    bias_i <- bias_i + rate * sign(mean load - load of expert i)

after the optimizer. The bias is added to the scores for the choice alone, so no gradient competes with that of the loss.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.engine.callbacks import Callback, Metrics, RunState
from shared.model.config import ModelConfig
from shared.model.roles import experts_of, role_of
from shared.moe.layer import MixtureLayer, mixture_layers
from shared.totals import Totals


def take_loads(model: nn.Module, add: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Return the loads of a step by block number, and reset the counts of loads and losses.

    Args:
        model: or a stage of it.
        add: adds the loads [layers, E] of all ranks that saw other tokens. Called where the model has layers to report.
    """
    layers = mixture_layers(model)
    if not layers:
        return {}
    device = layers[0].router.weight.device
    none = torch.zeros(layers[0].config.num_experts, dtype=torch.int64, device=device)
    loads = add(torch.stack([none if layer.load is None else layer.load for layer in layers]))
    for layer in layers:
        layer.load, layer.losses = None, {}
    return {layer.layer: load for layer, load in zip(layers, loads, strict=True)}


@torch.no_grad()
def update_bias(layer: MixtureLayer, load: Tensor) -> None:
    """One step of a router's bias, [E] or this rank's shard of it, towards equal load; nothing for a router without one."""
    bias = layer.router.bias
    if bias is None:
        return
    load = load.to(bias.dtype)
    move = layer.config.bias_update_rate * torch.sign(load.mean() - load)
    sharding = getattr(bias, "sharding", None)
    own = bias.to_local() if hasattr(bias, "to_local") else bias  # PyTorch's fully_shard has made it a DTensor
    own.add_(move if sharding is None else sharding.local(move).view_as(own))


def as_numbers(tensors: dict[Any, Tensor]) -> dict[Any, Any]:
    """Tensors of one shape, copied from the device together."""
    return dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True)) if tensors else {}


class BalanceExperts(Callback):
    """Updates the biases of all routers after each step that was not skipped (`shared.optim.updater`), and logs the load of each expert, in
    shares of an equal load (1 is balanced).

    Metrics, of the last step before the log: `experts/load/BLOCK.EXPERT`; `experts/max_load`, the fullest expert of all layers; and what
    all layers add to the mean loss of a token, `experts/balance_loss` and `experts/z_loss`, which `train/loss` does not contain.
    """

    every_rank = True

    def __init__(self) -> None:
        self.loads: dict[int, Tensor] = {}
        self.losses: dict[str, Tensor] = {}

    def on_step(self, engine: RunState) -> None:
        layers = mixture_layers(engine.strategy.module)

        def add(loads: Tensor) -> Tensor:
            zero = loads.new_zeros(())
            losses = {f"{name}/{layer.layer}": loss for layer in layers for name, loss in layer.losses.items()}
            self.losses = engine.strategy.sum(Totals(zero, zero, losses | {"loads": loads})).metrics
            return self.losses.pop("loads")

        self.loads = take_loads(engine.strategy.module, add)
        if not math.isfinite(engine.grad_norm):  # the updater has skipped the step: its gradients overflowed
            return
        for layer in layers:
            update_bias(layer, self.loads[layer.layer])

    def measure(self, engine: RunState) -> Metrics:
        k, totals = engine.strategy.module.config.experts.num_experts_per_tok, {}
        own: Metrics = {}
        for block, load in as_numbers(self.loads).items():
            totals[block] = max(sum(load), 1)
            own |= {f"experts/load/{block}.{expert}": count * len(load) / totals[block] for expert, count in enumerate(load)}
        own |= {name: loss * k / totals[int(name.split("/")[1])] for name, loss in as_numbers(self.losses).items()}
        every, losses = {}, Counter[str]()
        for name, value in engine.strategy.gather_stages(own).items():
            if name.startswith("experts/"):
                every[name] = value
            else:
                losses[f"experts/{name.split('/')[0]}"] += value
        return every | ({"experts/max_load": max(every.values())} if every else {}) | losses


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
