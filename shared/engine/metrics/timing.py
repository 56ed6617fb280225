"""Chapter 04. Where a step's time goes: waiting for data, computing, reducing, updating.

On a GPU, calls return before the work is done, and a clock around them measures nothing. So in the steps that are logged, and only
in those, the device is waited for at the end of each phase.
"""

import time
from collections.abc import Callable
from typing import Any

import torch


class PhaseTimer:
    """Seconds by phase of the step that is under way. `exact` waits for the GPU at each phase's end."""

    def __init__(self, device: torch.device):
        self.device, self.exact = device, False
        self.seconds: dict[str, float] = {}

    def begin(self, exact: bool) -> None:
        """A step begins. What an earlier one left the GPU to do is not this one's."""
        self.exact = exact
        self.wait()

    def wait(self) -> None:
        if self.exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is added to `seconds[phase]`."""

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.wait()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

        return call

    def take(self) -> dict[str, float]:
        """The seconds so far; the next step starts at none."""
        seconds, self.seconds = self.seconds, {}
        return seconds
