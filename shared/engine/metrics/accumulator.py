"""Chapter 04. Metrics between two logs: losses summed over tokens (`MetricAccumulator`), and seconds by phase of a step (`PhaseTimer`).

A log shows the mean loss per token since the last log, and reads it from the device once. On a GPU, calls return before the work is done,
and a clock around them measures nothing: in the steps that are logged, and only in those, `PhaseTimer` synchronizes with the device at the
end of each phase.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from shared.totals import Totals, add_totals


class MetricAccumulator:
    """Sums losses and metrics since the last log. The sums are in the checkpoint, so the first log after a resume is complete."""

    def __init__(self):
        self.totals: Totals | None = None

    def add(self, totals: Totals) -> None:
        self.totals = add_totals([totals] if self.totals is None else [self.totals, totals])

    def take(self) -> dict[str, float]:
        """Means per token since the last call: `loss`, in nats, and the objective's metrics. Empty where there was no step."""
        totals, self.totals = self.totals, None
        return {} if totals is None else {"loss": totals.mean_loss, **totals.mean_metrics()}

    def state_dict(self) -> dict[str, Any]:
        if self.totals is None:
            return {}
        metrics = {name: value.item() for name, value in self.totals.metrics.items()}
        dtype = str(self.totals.loss_sum.dtype).removeprefix("torch.")
        return {"dtype": dtype, "loss_sum": self.totals.loss_sum.item(), "token_count": self.totals.token_count.item(), "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = None
        if state:
            metrics = {name: torch.tensor(value) for name, value in state["metrics"].items()}
            loss_sum = torch.tensor(state["loss_sum"], dtype=getattr(torch, state["dtype"]))
            self.totals = Totals(loss_sum, torch.tensor(state["token_count"]), metrics)


class PhaseTimer:
    """Measures the seconds of each phase of a step: data, compute, reduce, update. `exact` synchronizes at each phase's end."""

    def __init__(self, device: torch.device):
        self.device, self.exact = device, False
        self.seconds: dict[str, float] = {}

    def begin(self, exact: bool) -> None:
        """Begin a step, after the GPU has finished the work of earlier steps."""
        self.exact = exact
        self.wait()

    def wait(self) -> None:
        if self.exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`, so that its time is added to `seconds[phase]`."""

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.wait()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

        return call

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them."""
        seconds, self.seconds = self.seconds, {}
        return seconds
