"""Chapter 04. Optimizer state by parameter name.

PyTorch numbers parameters by their order in the groups. A name survives what a number does not: another order, another grouping, a
layout in which this process holds only some of the parameters.
"""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shared.course.errors import CourseError

OF_THIS_RUN = ("params", "param_names", "foreach", "fused", "capturable")  # what a group holds, and how its step is computed

DRIVEN = ("lr", "base_lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")  # by a schedule
CYCLED = ("momentum", "betas")  # too, where a schedule of PyTorch's has left max_momentum in the group
RATES = ("lr", "initial_lr", "base_lr")  # what the setting lr stands for: the rate, and the one that it was given as
OPTIMIZER, LOADER = "optimizer", "loader"  # in `retune`: the whole optimizer, and the position in the data
KEEPS_MORE = ("amsgrad", "centered", "rule")  # with another value, the state holds other tensors

Plain = float | int | bool | str | None | list | tuple


@dataclass
class OptimizerState:
    """tensors: parameter name -> key -> tensor, such as `exp_avg`. values: the same for what is not a tensor. groups: the groups'
    settings, each with the `names` of its parameters."""

    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, dict[str, Plain]]
    groups: list[dict[str, Any]]


def name_optimizer_state(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """The state of `optimizer` by the names that `model` gives its parameters. Tensors are the live ones."""
    names = names_of(model, optimizer)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Plain]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        tensors[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    groups = [
        {key: value for key, value in group.items() if key not in OF_THIS_RUN} | {"names": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return OptimizerState(tensors, values, groups)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: OptimizerState) -> None:
    """Restore a named state, as copies on each parameter's device. Grouping may differ; settings follow the group of each first name.
    How a step is computed (`foreach`, `fused`, `capturable`) stays this run's choice.

    Raises:
        ValueError: parameters that only one of the two has, by name. Nothing is changed then.
    """
    names = names_of(model, optimizer)
    saved = {name: group for group in state.groups for name in group["names"]}
    if differing := sorted(set(names.values()) ^ set(saved)):
        raise ValueError(
            f"The optimizer of this run and the saved one differ in the parameters {', '.join(differing[:5])}"
            f"{' ...' if len(differing) > 5 else ''}: resume with the model and optimizer that were saved."
        )
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            tensors = {key: placed(tensor, key, parameter, group) for key, tensor in state.tensors.get(name, {}).items()}
            if entries := tensors | state.values.get(name, {}):
                optimizer.state[parameter] = entries
        if group["params"]:
            settings = copy.deepcopy(saved[names[group["params"][0]]])
            group.update({key: value for key, value in settings.items() if key != "names"})


class Difference(NamedTuple):
    """A setting of a parameter's group that is not the saved one. word: what allows it in `RuntimeEngine.fit(retune=...)`."""

    key: str
    name: str
    here: Any
    there: Any
    word: str


def settings_that_differ(model: nn.Module, optimizer: Optimizer, state: OptimizerState) -> Iterator[Difference]:
    """The settings of each parameter's group that are not what was saved. Learning rates are compared as they were given, not as a
    schedule has left them."""
    names = names_of(model, optimizer)
    saved = {name: group for group in state.groups for name in group["names"]}
    for group in optimizer.param_groups:
        for name in (names[parameter] for parameter in group["params"] if names[parameter] in saved):
            here, there = settings_of(group), settings_of(saved[name])
            left_out = CYCLED if "max_momentum" in saved[name] else ()
            for key in sorted(here.keys() - left_out):
                values = here[key], there.get(key)
                if values[0] != values[1] and not (key == "lr" and None in values):
                    word = OPTIMIZER if here.keys() - there.keys() or key in KEEPS_MORE else key
                    yield Difference(key, name, *values, word)


def require_same_settings(model: nn.Module, optimizer: Optimizer, state: OptimizerState) -> None:
    """Refuse an optimizer with other settings than the saved one: the saved ones would silently replace them."""
    for key, name, here, there, word in settings_that_differ(model, optimizer, state):
        raise ValueError(
            f"The optimizer's {key} for {name} is {here} here and {there} in the saved run: resume with what was saved, or begin a new run "
            f"in another output folder. To continue this run with it, call fit with retune=[{word!r}]"
            f"{', which empties the state of the optimizer' if word == OPTIMIZER else ''}."
        )


def require_settings(optimizer: Optimizer, retune: Collection[str]) -> None:
    """Refuse to retune a setting that does not exist, which would silently change nothing."""
    known = {OPTIMIZER, LOADER}.union(*(group.keys() - {*OF_THIS_RUN} for group in optimizer.param_groups))
    if unknown := sorted({*retune} - known):
        raise CourseError(f"retune names {unknown[0]!r}: give {', '.join(sorted(known))}.")


def retuned(model: nn.Module, optimizer: Optimizer, state: OptimizerState, retune: Collection[str]) -> tuple[OptimizerState, list[str]]:
    """A saved state with this run's settings in it.

    Args:
        retune: keys of the groups, such as lr, whose values are this run's; or `optimizer`, which discards all saved state and settings.

    Returns:
        The state, and a sentence about each setting that is another now.
    """
    differing = list(settings_that_differ(model, optimizer, state))
    said = {f"The optimizer's {each.key} is {each.here} and was {each.there}." for each in differing if each.word in retune}
    names = names_of(model, optimizer)
    here = {names[parameter]: group for group in optimizer.param_groups for parameter in group["params"]}
    if OPTIMIZER in retune:
        given = [(name, {key: value for key, value in group.items() if key not in OF_THIS_RUN}) for name, group in here.items()]
        groups = [group | {"names": [name]} for name, group in given]
        return OptimizerState({}, {}, groups), ["The optimizer is another one: its state begins empty."]
    keys = {*retune, *(RATES if "lr" in retune else ())} - {*KEEPS_MORE}
    groups = []
    for group in state.groups:
        for name in group["names"]:
            mine = here.get(name, group)
            kept = {key: value for key, value in group.items() if key not in keys or (key not in mine and key not in RATES)}
            groups.append(kept | {key: mine[key] for key in keys if key in mine and (key in group or key in RATES)} | {"names": [name]})
    return replace(state, groups=groups), sorted(said)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's own settings, after a round trip through JSON, without those that a schedule sets. `lr` is the initial rate, or None."""
    left_out = {*OF_THIS_RUN, *DRIVEN, "names"}
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key not in left_out}
    return given | {"lr": None if "max_lr" in group else group.get("initial_lr")}  # max_lr: of a cycle, which chooses all rates


def placed(tensor: Tensor, key: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """A copy on the device where the optimizer needs it: the parameter's; of the step count the CPU, which reads it at each step, unless
    the step is computed on the device alone."""
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return tensor.to(parameter.device if on_device else "cpu", copy=True)


def names_of(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    strangers = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"The optimizer holds {len(strangers)} parameters that are not the model's, of shapes {strangers[:3]}: "
            "make it over model.parameters()."
        )
    return {parameter: names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
