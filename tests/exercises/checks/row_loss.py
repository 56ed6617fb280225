"""The check of a loss of each row, be it a pair or a token: with what flows back, by its value alone, and in halves over two ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.counting import cost, within

from .common import ANY, ARITHMETIC, CONTRACT, as_leaves, with_gradients

Results = dict[str, Any]


@dataclass(frozen=True)
class RowLoss:
    """What is observed of such a loss, and what is expected.

    leaves: the arguments to which gradients flow, or must not.
    oracle: the results that are expected, with their gradients.
    """

    leaves: tuple[str, ...]
    oracle: Callable[..., Results]
    name: str = "loss"
    near: float = 1e-5  # of worked examples

    def observed(self, function: Callable, **given: Any) -> Results:
        """The loss, and what flows back to each of the leaves, where also nothing may."""
        leaves = as_leaves(given, *self.leaves)
        return with_gradients(function(**given | leaves), leaves, self.name)

    def value(self, function: Callable, **given: Any) -> Results:
        return {self.name: function(**given)}

    def only(self, expected: Callable[..., Results]) -> Callable[..., Results]:
        """The losses without their gradients."""
        return lambda **given: {self.name: expected(**given)[self.name]}

    def example(self, title: str, given: Callable, *losses: Any, source: str = ARITHMETIC) -> Case:
        return Case("worked example", title, given, self.answer(*losses), source, rtol=self.near)

    def answer(self, *losses: Any) -> Callable[..., Results]:
        return lambda **given: {self.name: torch.tensor(losses, dtype=torch.float64).to(given[self.leaves[0]].dtype)}

    def halves(self, title: str, given: Callable) -> Case:
        """Two ranks with the rows before and from `cut` on; `given` has that as well."""

        def observe(function: Callable, cut: int, **given: Any) -> Results:
            parts = [{name: value[own] if isinstance(value, Tensor) else value for name, value in given.items()}
                     for own in (slice(cut), slice(cut, None))]  # fmt: skip
            return {self.name: torch.cat([function(**part) for part in parts])}

        def whole(cut: int, **given: Any) -> Results:
            return self.only(self.oracle)(**given)

        return Case("two ranks", title, given, whole, CONTRACT, observe, rtol=1e-12, atol=1e-12)

    def budget(self, rows: str, drawn: Callable) -> Case:
        """Nothing is computed more often for six times as many rows."""

        def observe(function: Callable) -> Results:
            sizes = {f"{count} {rows}": drawn(count, dtype=torch.float32)() for count in (10, 60)}
            return cost(function, ANY, 1, sizes)

        return Case("budget", f"six times as many {rows}", dict, lambda: within(ANY), CONTRACT, observe, rtol=1e-12, atol=1e-12)
