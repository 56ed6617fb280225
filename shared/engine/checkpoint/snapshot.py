"""Chapter 04. Resume: a run's training state, with its random state (RNG state), taken and restored to the same weights bit for bit.

A training step is a function of the weights, the optimizer's state, the position in the data, the random numbers that dropout
will draw, and the state of whatever else changes from step to step (a loss scale, the patience of early stopping). `Snapshot` holds
all of that by name; `take_snapshot` takes it and `restore` puts it back.

Initial weights and the order of the data do not depend on generators: those are functions of a seed and a name or a sample's number. What
is left is dropout, and code of the reader's that draws from Python's or NumPy's generator.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.course.binding import exercise
from shared.engine.checkpoint.optimizer_state import OptimizerState, name_optimizer_state


@dataclass
class RandomState:
    """torch: device name -> [bytes] uint8. python, numpy: states as JSON can hold them."""

    torch: dict[str, Tensor]
    python: list[Any]
    numpy: dict[str, Any]


def get_random_state() -> RandomState:
    """The states of torch's generators (the CPU's and each GPU's), Python's and NumPy's."""
    states = {"cpu": torch.get_rng_state()}
    states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])}
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    numpy = {"name": name, "keys": keys.tolist(), "position": position, "has_gauss": has_gauss, "cached": cached}
    return RandomState(states, [version, list(internal), gauss], numpy)


def require_usable(state: RandomState) -> RandomState:
    """Validate a random state by loading it into throw-away generators.

    Raises:
        TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError: it is no state of a generator, whichever notices it first.
    """
    torch.Generator().set_state(state.torch["cpu"])
    random.Random().setstate(python_state(state))
    np.random.RandomState().set_state(numpy_state(state))
    return state


def set_random_state(state: RandomState) -> None:
    """Restore the generators. GPUs that this machine does not have are skipped."""
    torch.set_rng_state(state.torch["cpu"].cpu())
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in state.torch:
            torch.cuda.set_rng_state(state.torch[f"cuda:{index}"].cpu(), index)
    if "mps" in state.torch and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state.torch["mps"].cpu())
    random.setstate(python_state(state))
    np.random.set_state(numpy_state(state))


def python_state(state: RandomState) -> tuple[Any, ...]:
    version, internal, gauss = state.python
    return version, tuple(internal), gauss


def numpy_state(state: RandomState) -> tuple[Any, ...]:
    numpy = state.numpy
    return numpy["name"], np.array(numpy["keys"], dtype=np.uint32), numpy["position"], numpy["has_gauss"], numpy["cached"]


class Stateful(Protocol):
    """A further part of a run with state: the data loader, a callback, a loss scale. The state is a small dictionary that JSON can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Snapshot:
    """Everything that the next step depends on.

    step: steps that are done.
    weights: name -> parameter or buffer, as `model.state_dict()` names it; a tensor under two names stands once.
    optimizer: the optimizer's state by parameter name.
    parts: name -> state of each `Stateful`.
    random: the generators' states.
    """

    step: int
    weights: dict[str, Tensor]
    optimizer: OptimizerState
    parts: dict[str, dict[str, Any]]
    random: RandomState


def take_snapshot(step: int, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> Snapshot:
    """The state of a run between two steps. Tensors are the live ones, not copies."""
    return Snapshot(
        step,
        weights_of(model),
        name_optimizer_state(model, optimizer),
        {name: part.state_dict() for name, part in parts.items()},
        get_random_state(),
    )


def weights_of(model: nn.Module, everything: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers by name, each tensor once: a tied head is the embedding. Without those that are `kept_elsewhere`
    (`shared.model.roles`), unless everything is asked for."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (everything or not getattr(tensor, "kept_elsewhere", False)):
            weights[name] = tensor.detach()
            seen.add(id(tensor))
    return weights


@exercise("04.restore")
def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> int:
    """Put a run back to where `take_snapshot` took it.

    Weights are copied into the tensors that the model has (`weights_of` names them), because the optimizer and
    tied layers hold references to those. `load_optimizer_state` puts the optimizer's state back by parameter name, `set_random_state` the
    generators. Loading a part may draw random numbers, so the generators come last.

    Args:
        snapshot: left as it is; nothing of it is shared with the run afterwards.
        model, optimizer, parts: as they were made for the new run, of any state. Changed in place.

    Returns:
        How many steps are done.

    Raises:
        ValueError: before anything is changed: the weights, the parts or the optimizer's parameters have other names than the
            snapshot's, or a weight has another shape. The message holds the names.
    """
