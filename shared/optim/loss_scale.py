"""Chapter 05. Dynamic loss scaling for float16: a scale that keeps gradients from vanishing, and does not let them overflow.

float16 has no number between 0 and 6e-8, and many gradients deep in a network are smaller: they become 0, and nothing is learned.
Multiplied by a large scale, the loss has gradients that are larger by that scale everywhere; the float32 gradient of the weight is
divided by it again. The largest scale without an overflow is found by trying (Micikevicius et al. 2018, "Mixed Precision
Training", section 3.2).

Left out on purpose: bfloat16 needs none of this. It has float32's range.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from torch import nn

from shared.course.binding import exercise
from shared.course.bounds import Bounds, Fraction, PositiveFloat, PositiveInt, checked
from shared.engine.callbacks import Callback, Metrics, RunState
from shared.model.transformer import set_loss_scale
from shared.totals import Batch, Objective, Runner, Totals

SMALLEST = 2.0**-24  # the smallest number of float16: an overflow at this scale has another cause


class LossScale(NamedTuple):
    """The state of dynamic loss scaling. scale: multiplies the loss. good_steps: steps without an overflow since it last changed."""

    scale: float
    good_steps: int


@exercise("05.update_scale")
def update_scale(state: LossScale, finite: bool, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
    """The loss scale of the next step (Micikevicius et al. 2018, section 3.2).

    After a step whose gradients were not all finite: the scale times `backoff`, and the count restarts at 0.
    After a good step: the count is one higher; where it reaches `interval`, or is above it already (a run
    may be resumed with a shorter interval), the scale times `growth`, and the count restarts at 0.

    Args:
        state: of the step that was tried.
        finite: whether all its gradients were finite.
        growth: above 1. backoff: between 0 and 1.
        interval: good steps in a row after which a larger scale is tried.

    Returns:
        A new state; the old one is left as it is.

    >>> update_scale(LossScale(8.0, 1), finite=True, interval=2)
    LossScale(scale=16.0, good_steps=0)
    """


@dataclass
@checked
class LossScaleConfig:
    """Options of dynamic loss scaling.

    Args:
        initial: the scale of the first step. A large one costs a few skipped steps; with a small one gradients vanish until it has grown.
            Losses are sums over tokens here, so it is smaller than the 2**16 that is usual for means.
        growth: multiplies the scale after `interval` good steps.
        backoff: multiplies the scale after an overflow.
        interval: good steps in a row.
    """

    initial: PositiveFloat = 2.0**10
    growth: Annotated[float, Bounds(gt=1)] = 2.0
    backoff: Fraction = 0.5
    interval: PositiveInt = 2000


class LossScaler:
    """A gradient scaler, which keeps the loss scale between steps: `scaled` scales the losses, `Update` (shared.optim.updater) unscales."""

    def __init__(self, config: LossScaleConfig | None = None):
        self.config = config or LossScaleConfig()
        self.state = LossScale(self.config.initial, 0)

    def scaled(self, runner: Runner) -> Runner:
        """Wrap `runner`, so that losses are multiplied by the scale before their backward pass. The totals that it returns are unscaled.

        The model gets the scale too, so that auxiliary losses inside it (`shared.model.context`) are multiplied by it like the loss.
        """

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            scale = self.state.scale

            def scaled_objective(model: nn.Module, batch: Batch) -> Totals:
                totals = objective(model, batch)
                return totals._replace(loss_sum=totals.loss_sum * scale)

            set_loss_scale(model, scale)
            try:
                totals = runner(model, microbatches, scaled_objective)
            finally:
                set_loss_scale(model, 1.0)
            return totals._replace(loss_sum=totals.loss_sum / scale)

        return run

    def update(self, finite: bool) -> None:
        """Update the scale after a step.

        Raises:
            ValueError: the scale has fallen so low that it cannot be the cause of the overflow.
        """
        self.state = update_scale(self.state, finite, self.config.growth, self.config.backoff, self.config.interval)
        if self.state.scale < SMALLEST:
            raise ValueError(
                f"The loss scale has fallen to {self.state.scale:.1e} and gradients are still not finite: the run has diverged. "
                "Lower the learning rate, clip, or train in bfloat16."
            )

    def state_dict(self) -> dict[str, Any]:
        return self.state._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = LossScale(**state)


class KeepLossScale(Callback):
    """Saves the loss scale in checkpoints, and logs it as `train/loss_scale`."""

    every_rank = True

    def __init__(self, scaler: LossScaler):
        self.scaler = scaler

    def measure(self, engine: RunState) -> Metrics:
        return {"train/loss_scale": self.scaler.state.scale}

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
