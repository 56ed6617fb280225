"""Chapter 05. Build an optimizer from a configuration and a model: one over all of it.

Every option takes effect or raises an error, for instance a pattern that matches no parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shared.course.errors import SettingError
from shared.course.extensions import bound, called
from shared.optim.config import OptimizerConfig
from shared.optim.optimizer import GroupedOptimizer
from shared.optim.routing import Route, route

BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.99)}


def build_optimizer(model: nn.Module, config: OptimizerConfig, routes: Sequence[Route] | None = None) -> Optimizer:
    """Build one optimizer over every trainable parameter of the model: a `GroupedOptimizer`, or one by import path.

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
    groups = [[parameters[name] for name in part.names if name in parameters] for part in routes]
    if config.is_extension:
        return own_optimizer(config)([{"params": group} | own_settings(config, part) for group, part in zip(groups, routes, strict=True)])
    return GroupedOptimizer([{"params": group} | settings_of(config, part) for group, part in zip(groups, routes, strict=True)])


def own_optimizer(config: OptimizerConfig) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """The factory of an optimizer by import path, which takes parameter groups."""
    offered = {"lr": config.lr, "weight_decay": config.weight_decay}
    made = bound(config.name, config.options, "optimizer.name", "params", offered=offered)
    if not (isinstance(made.func, type) and issubclass(made.func, Optimizer)):
        raise SettingError(f"optimizer.name: {config.name} is no torch.optim.Optimizer: derive its class from that.")
    if "lr" not in made.keywords:
        raise SettingError(f"optimizer.name: {called(config.name)} takes no lr, which optimizer.lr and the schedule set: give it one.")
    if config.weight_decay and "weight_decay" not in made.keywords:
        raise SettingError(f"optimizer.weight_decay is {config.weight_decay} and {called(config.name)} takes none: give 0.")
    return made


def own_settings(config: OptimizerConfig, part: Route) -> dict[str, Any]:
    """A group's name and rates, for an optimizer by import path."""
    name = called(part.rule)
    decay = {"weight_decay": config.weight_decay if part.decays else 0.0} if config.weight_decay else {}
    return {"name": name if part.decays else f"{name}_no_decay", "lr": config.lr} | decay


def settings_of(config: OptimizerConfig, part: Route) -> dict[str, Any]:
    """The settings that a group's rule reads, and no others."""
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
