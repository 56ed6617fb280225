"""Chapter 05. Build an optimizer from a configuration and a model: one over all of it.

Every option takes effect or raises an error, for instance a pattern that matches no parameter.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shared.optim.config import OptimizerConfig
from shared.optim.optimizer import GroupedOptimizer
from shared.optim.routing import Route, route

BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.99)}


def build_optimizer(model: nn.Module, config: OptimizerConfig, routes: Sequence[Route] | None = None) -> GroupedOptimizer:
    """Build one optimizer over every trainable parameter of the model.

    Args:
        routes: which rule updates which parameter, where that was decided on a larger model than this part of it: names that are not here
            are left out, and a group may be empty. None to decide it on this model.

    Raises:
        ValueError: see `route` and `OptimizerConfig`; a trainable parameter that no route names, so that it would stand still.
    """
    parameters = dict(model.named_parameters())
    routes = routes or route(model, config.name, no_decay=config.no_decay, to_adamw=config.to_adamw)
    routed = {name for part in routes for name in part.names}
    if left_out := [name for name, parameter in parameters.items() if parameter.requires_grad and name not in routed]:
        raise ValueError(f"{left_out[0]} is to be trained and no route names it: decide routes on a model that has all parameters.")
    return GroupedOptimizer(
        [{"params": [parameters[name] for name in part.names if name in parameters]} | settings_of(config, part) for part in routes]
    )


def settings_of(config: OptimizerConfig, part: Route) -> dict[str, Any]:
    """What a group's rule reads, and nothing that it does not."""
    lr = config.lr if part.rule == config.name or config.adamw_lr is None else config.adamw_lr
    name = part.rule if part.decays else f"{part.rule}_no_decay"
    settings = {"name": name, "rule": part.rule, "lr": lr, "weight_decay": config.weight_decay if part.decays else 0.0}
    if part.rule in BETAS:
        settings["betas"] = config.betas or BETAS[part.rule]
    if part.rule == "adamw":
        settings |= {"eps": config.eps, "fused": config.fused}
    if part.rule in ("muon", "sgd"):
        settings["momentum"] = config.momentum
    if part.rule == "muon":
        settings |= {"nesterov": config.nesterov, "scaling": config.scaling}
        settings |= {"steps": config.newton_schulz_steps, "dtype": config.newton_schulz_dtype or "bfloat16"}
    return settings
