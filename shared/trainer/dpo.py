"""Chapter 12. Direct preference optimization (DPO) and its relatives as a mode of the trainer, and win rates before and after.

The rows are chapter 11's: packed pairs of a chosen and a rejected answer, with the log-probabilities that the reference gives. The
reference is the model that the run starts from, so its log-probabilities are computed before the first step, and no second model is needed.
"""

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from shared.data.digests import Digests
from shared.data.prepare import DIGESTS
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.preference.baseline import BaselinedLoader
from shared.preference.log_probs import score_answers
from shared.preference.objective import PreferenceObjective
from shared.preference.prepare import PreparedPairs
from shared.preference.reference import ReferencedLoader, Score, cached_reference, scorer
from shared.preference.rows import preference_loaders
from shared.totals import Totals
from shared.trainer import provenance
from shared.trainer.answering import Loaders, trained_parameters
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import InitialWeights
from shared.trainer.models import first_scorer
from shared.trainer.preferring import Preferring
from shared.trainer.report import Judged

if TYPE_CHECKING:
    from shared.trainer.run import Run


class PreferenceTuning(Preferring):
    """The mode dpo (`shared.trainer.modes.Mode`)."""

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        super().__init__(config, start, world, console)
        self.objective = PreferenceObjective(config.dpo)
        self.score: Score | None = None

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> Loaders:
        if config.dpo.needs_reference:
            self.score = self.reference(config, strategy)
            if config.dpo.reference == "cached":
                self.text = self.cached(config, strategy)
        return super().loaders(config, strategy)

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        kto = config.dpo.loss == "kto"
        found = preference_loaders(self.text, answers=kto, **self.sizes(config, strategy.mesh, held_out_rows))
        if self.score is None or config.dpo.reference == "cached":
            return found
        if kto:
            policy = scorer(strategy.model, autocast_objective(score_answers, config.precision))
            found = tuple(BaselinedLoader(loader, self.score, policy, strategy.mesh.data) for loader in found)
        training, held_out = (ReferencedLoader(loader, self.score) for loader in found)
        return training, held_out

    def reference(self, config: TrainerConfig, strategy: ParallelStrategy) -> Score:
        """What computes reference log-probabilities: the model while it still has its first weights, that model without its adapter, or a
        copy kept beside."""
        score = autocast_objective(score_answers, config.precision)
        if config.adapter or config.dpo.reference == "beside":
            return first_scorer(config, self.start, strategy, score)
        return scorer(strategy.model, score)

    def cached(self, config: TrainerConfig, strategy: ParallelStrategy) -> PreparedPairs:
        """The prepared pairs with the reference's log-probabilities."""
        world, mesh = strategy.mesh.world, strategy.mesh
        weights = agreed(world, lambda: self.start.fingerprint(Digests(config.data.prepared / DIGESTS)))
        # The section `model` may differ from that of the files, in RoPE's frequencies, and then the same weights say something else.
        facts = [weights, config.precision, provenance.plain(config.model), config.adapter and config.adapter.base]
        identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        sizes = {"seq": config.data.seq, "batch_size": config.data.micro_batch_size, "world": world, "data": mesh.data}
        training, held_out = (
            cached_reference(store, self.score, identity, **sizes) for store in (self.text.training, self.text.held_out)
        )
        return replace(self.text, training=training, held_out=held_out)

    def judge(self, run: "Run", model: TransformerModel, totals: Totals) -> Judged:
        preferred, summary = self.preferred(run, model)
        means = totals.mean_metrics()
        what = "answers" if run.config.dpo.loss == "kto" else "pairs"
        summary |= {
            f"held-out loss on {what}": totals.mean_loss,
            f"held-out {what} ranked right": means["accuracy"],
            "held-out margin of implicit rewards": means["margin"],
            "trained parameters": trained_parameters(model),
        }
        return Judged(
            summary, self.samples(run, model), preferred=preferred, example=self.example(), unit=f"nats per {what.removesuffix('s')}"
        )
