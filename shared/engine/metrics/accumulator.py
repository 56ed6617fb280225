"""Chapter 04. The losses since the last log, summed over tokens: a log shows their mean, and asks the device for it once."""

from typing import Any

import torch

from shared.totals import Totals, add_totals


class Window:
    """Totals of the steps since the last log. Its state makes the first log after a resume the one that it would have been."""

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
