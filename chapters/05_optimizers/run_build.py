"""A learner's whole build in chapter 05's run: their one optimizer of AdamW and Muon, in place of the core's.

`run.py` takes it with `--impl mine` (or `mixed`) where every stage of the build has passed. Schedule, clipping and loss scale stay the
core's, which work with any `torch.optim.Optimizer`.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from shared.course.build_check import Functions
from shared.model.roles import role_of
from shared.optim.build import settings_of
from shared.optim.config import OptimizerConfig
from shared.optim.routing import Route

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7  # of Newton-Schulz: the run has no option for them
ONLY_THE_CORES = ("no_decay", "to_adamw", "fused")  # options that the build does not have


def built_optimizer(build: Functions | None, model: nn.Module, config: OptimizerConfig) -> Optimizer | None:
    """The build's optimizer over all of a model's parameters; None where there is no build, or it cannot do what is asked for.

    It computes in the dtype of the weights, so `newton_schulz_dtype` does not count.
    """
    if build is None or config.name not in ("adamw", "muon") or any(getattr(config, option) for option in ONLY_THE_CORES):
        return None
    named = list(model.named_parameters(remove_duplicate=False))
    optimizer = build.make(named, {name: build_role(name, parameter, config.name) for name, parameter in named}, build_settings(config))
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]  # which the schedule multiplies
    return optimizer


def build_role(name: str, parameter: nn.Parameter, rule: str) -> str:
    """A parameter's role in the build's words. Without Muon a matrix is called what AdamW updates, and decays, just as well."""
    role = role_of(name, parameter)
    if role in ("matrix", "expert") and rule == "adamw":
        return "embedding"
    return "experts" if role == "expert" else role


def build_settings(config: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """The options of both rules, under the build's names."""
    adamw, muon = (settings_of(config, Route(rule, True, ())) for rule in ("adamw", "muon"))
    return {
        "adamw": {key: adamw[key] for key in ("lr", "betas", "eps", "weight_decay")},
        "muon": {key: muon[key] for key in ("lr", "weight_decay", "momentum", "nesterov")}
        | {"ns_coefficients": COEFFICIENTS, "eps": EPS, "ns_steps": muon["steps"], "adjust_lr_fn": muon["scaling"]},
    }
