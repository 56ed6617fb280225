"""Chapter 04. Random state (RNG state) of all generators that a step may draw from, so that a resumed run draws the same numbers.

Initial weights and the order of the data do not depend on them: those are functions of a seed and a name or a sample's number.
What is left is dropout, and code of the reader's that draws from Python's or NumPy's generator.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    """The same state, after throw-away generators have taken it.

    Raises:
        TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError: it is no state of a generator, whichever notices it first.
    """
    torch.Generator().set_state(state.torch["cpu"])
    random.Random().setstate(python_state(state))
    np.random.RandomState().set_state(numpy_state(state))
    return state


def set_random_state(state: RandomState) -> None:
    """Put the generators back. A GPU that this machine does not have is left out: its numbers were drawn elsewhere."""
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
