"""Chapter 12. Reward model training as a mode of the trainer: a scalar head learns which answer of a pair is preferred; with calibration.

The rows are chapter 11's pairs with each answer's last token, at which its reward is read. What is exported is transformers' sequence
classification with one label.
"""

from typing import TYPE_CHECKING

from rich.console import Console

from shared.course import figures as style
from shared.devices import on_device
from shared.loop import evaluate
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.strategy import ParallelStrategy
from shared.preference.calibration import calibration_objective, draw_reliability, reliability
from shared.preference.reward_model import RewardObjective, as_reward_model
from shared.preference.rows import preference_loaders
from shared.totals import Totals
from shared.trainer.answering import Loaders, trained_parameters
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import InitialWeights
from shared.trainer.preferring import Preferring
from shared.trainer.report import Judged

if TYPE_CHECKING:
    from shared.trainer.run import Run


class RewardModelling(Preferring):
    """The mode reward (`shared.trainer.modes.Mode`)."""

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        super().__init__(config, start, world, console)
        self.objective, self.seed = RewardObjective(config.reward), config.seed

    @property
    def pad_id(self) -> int:
        """transformers finds a text's last token as the last one that is no padding, so padding must be no token that ends an answer."""
        return next(number for number in (self.tokenizer.end_id, 0, 1) if number not in self.end_ids)

    def shaped(self, model: TransformerModel) -> TransformerModel:
        return as_reward_model(model, self.seed)

    def require_answerable(self, config: TrainerConfig) -> None:
        """A reward model writes nothing."""

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        return preference_loaders(self.text, whole=True, **self.sizes(config, strategy.mesh, held_out_rows))

    def judge(self, run: "Run", model: TransformerModel, totals: Totals) -> Judged:
        held_out = preference_loaders(self.text, whole=True, **self.sizes(run.config, run.strategy.mesh, None) | {"rank": 0, "ranks": 1})[1]
        objective = autocast_objective(calibration_objective, run.config.precision)
        found = reliability(evaluate(model, (on_device(batch, run.engine.device) for batch in held_out), objective))
        means, figure = totals.mean_metrics(), style.new_figure()
        draw_reliability(figure.subplots(), found)
        summary = {
            "held-out loss on pairs": totals.mean_loss,
            "held-out pairs ranked right": means["accuracy"],
            "held-out margin of rewards": means["margin"],
            "expected calibration error": found.expected_calibration_error,
            "trained parameters": trained_parameters(model),
        }
        return Judged(summary, figures={"calibration": figure}, unit="nats per pair", example=self.example())
