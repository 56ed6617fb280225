"""Chapter 05. Engine callbacks for the learning-rate schedule, and for the loss scale in checkpoints and logs.

The learning rate is a function of the engine's step count, which is in the checkpoint, so the schedule itself has no state to save. The
engine logs every group's rate.
"""

from typing import TYPE_CHECKING, Any

from shared.engine.callbacks import Callback, Metrics
from shared.optim.config import ScheduleConfig
from shared.optim.loss_scale import LossScaler
from shared.optim.schedules import factor_at, set_learning_rate

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine


class ScheduleLearningRate(Callback):
    """Applies the learning-rate schedule: before each step, sets every group's `lr` from its `base_lr`."""

    every_rank = True

    def __init__(self, schedule: ScheduleConfig):
        self.schedule = schedule

    def on_start(self, engine: "RuntimeEngine") -> None:
        for group in engine.optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])

    def before_optimizer(self, engine: "RuntimeEngine") -> None:
        set_learning_rate(engine.optimizer, factor_at(self.schedule, engine.step + 1))


class KeepLossScale(Callback):
    """Saves the loss scale in checkpoints, and logs it as `train/loss_scale`."""

    every_rank = True

    def __init__(self, scaler: LossScaler):
        self.scaler = scaler

    def measure(self, engine: "RuntimeEngine") -> Metrics:
        return {"train/loss_scale": self.scaler.state.scale}

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
