"""What the checks of chapter 02 share: random tensors, and a function's result together with its gradients.

Gradients are taken for a random cotangent: behind a bare sum, softmax and the norms have none.
"""

from collections.abc import Callable

from torch import Tensor

from .common import randn


def with_gradients(function: Callable, leaves: tuple[str, ...], given: dict) -> dict[str, Tensor]:
    """What `function` returns, and what flows back to the named arguments when it is multiplied by random numbers."""
    given = {name: value.detach().requires_grad_() if name in leaves else value for name, value in given.items()}
    out = function(**given)
    (out * randn(*out.shape, seed=97, dtype=out.dtype)).sum().backward()
    return {"result": out.detach()} | {f"gradient of {name}": given[name].grad for name in leaves}


def observing(*leaves: str) -> Callable:
    """An observation for a case: the result, and the gradients of these arguments."""
    return lambda function, **given: with_gradients(function, leaves, given)


def expecting(oracle: Callable, *leaves: str) -> Callable:
    """The same of an oracle."""
    return lambda **given: with_gradients(oracle, leaves, given)
