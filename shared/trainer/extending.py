"""Chapter 12. Extensions of a run: what its configuration names by import path is loaded and checked before any work begins.

`chapters/12_grpo/EXTENDING.md` has an example of each. An extension's own state is saved where the core's is: an optimizer's by parameter
name, a callback's by its `state_dict`. What a layout would silently get wrong is refused by name.
"""

from collections.abc import Iterator

import torch
from torch import nn

from shared.course.errors import CourseError, SettingError
from shared.course.extensions import called, is_import_path
from shared.data.cleaning.cleaner import NAMES, own_stage
from shared.engine.defaults import own_callbacks
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel
from shared.moe.builders import CALLED_WITH, MIXTURE, own_part
from shared.optim.build import own_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.schedules import factor_at
from shared.parallel.config import ParallelConfig
from shared.rl.reward_worker import function_of
from shared.totals import Batch, Objective, Totals
from shared.trainer.config import TrainerConfig

CUT = ("zero", "fully_sharded", "tensor_parallel", "expert_parallel")  # layouts in which a rank has a part of a parameter


def require_extensions(config: TrainerConfig) -> None:
    """Load what the configuration names by import path, and refuse what cannot work.

    Raises:
        SettingError: names the setting.
    """
    own_callbacks(config.engine)
    factor_at(config.schedule, 1)
    if config.mode == "pretrain":
        for stage in config.data.prepare.cleaning.stages:
            if stage not in NAMES:
                own_stage(stage)
    if config.mode == "grpo":
        for reward in config.grpo.rewards:
            if is_import_path(reward.name):
                function_of(reward.name, reward.options)
    if config.objective:
        config.objective.bound("objective", "model", "batch", "objective")
    if config.optimizer.is_extension:
        require_whole_parameters(config.optimizer, config.parallel)
    for kind in own_parts(config):
        own_part(config.model, kind)
        for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
            if (degree := getattr(config.parallel, name)) > 1:
                raise SettingError(f"model.parts.{kind} with parallel.{name} {degree}: nothing says how to cut a part of your own. Give 1.")
        if config.report.export:
            raise SettingError(f"model.parts.{kind} is of your own, and no other program's format can say so: give report.export false.")


def require_whole_parameters(optimizer: OptimizerConfig, parallel: ParallelConfig) -> None:
    """Refuse an optimizer by import path where it would step parts of parameters and does not say that it may."""
    made = own_optimizer(optimizer).func
    for name in CUT:
        if (degree := getattr(parallel, name)) > (0 if name == "zero" else 1) and not getattr(made, "elementwise", False):
            raise SettingError(
                f"optimizer.name {called(optimizer.name)} with parallel.{name} {degree}: each rank would step its parts of the parameters. "
                f"If it treats each number alone, write `elementwise = True` in its class; else give {0 if name == 'zero' else 1}."
            )


def own_parts(config: TrainerConfig) -> Iterator[str]:
    """The parts of the model that are by import path."""
    parts = getattr(config.model, "parts", None)  # which only chapter 09's configuration has
    return (kind for kind in CALLED_WITH if getattr(parts, kind, None))


def parameter_count(config: TrainerConfig) -> int:
    """Of the run's model, which is built without memory where parts of it are by import path."""
    if not [*own_parts(config)]:
        return sum(parameter_counts(config.model).values())
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TransformerModel(config.model, MIXTURE).parameters())


def objective_of(config: TrainerConfig, of_mode: Objective) -> Objective:
    """The run's objective: the mode's, or in training one by import path, which is called with the mode's too. Evaluations keep the mode's,
    so that held-out losses stay comparable."""
    if config.objective is None:
        return of_mode
    own, name = config.objective.bound("objective", "model", "batch", "objective"), config.objective.name

    def objective(model: nn.Module, batch: Batch) -> Totals:
        if not model.training:
            return of_mode(model, batch)
        found = own(model, batch, of_mode)
        if not isinstance(found, Totals):
            raise CourseError(f"objective: {name} returned {type(found).__name__}: it must return shared.totals.Totals.")
        return found

    return objective
