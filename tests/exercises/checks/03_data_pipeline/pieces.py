"""What the checks of chapter 03 share. Everything here is whole numbers and text: results are compared exactly."""

from collections.abc import Callable

import torch
from torch import Tensor

CONTRACT = "the contract"


def given(**arguments) -> Callable:
    """Arguments of a case, copied at each call so that no answer can spoil the next one's."""
    return lambda: {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()}


def answer(name: str, value) -> Callable:
    """An expectation that was worked out by hand."""
    return lambda **given: {name: value}


def refused(**given) -> dict:
    return {"raised": "ValueError"}


def random_ids(count: int, seed: int, most: int = 7) -> list[int]:
    return torch.randint(most, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ids(*values: int, dtype=torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)
