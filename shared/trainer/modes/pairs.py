"""Chapter 12. The modes that learn from pairs of a chosen and a rejected answer: reward models, and DPO and its relatives.

The rows are chapter 11's. DPO's have the reference's log-probabilities: the reference is the model that the run starts from, so they are
computed before the first step, and no second model is needed. A reward model reads each answer's reward at its last token, and is
exported as transformers' sequence classification with one label. What both and PPO have in common is here too: the preparation of pairs,
and the win rate before and after by a hidden preference.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from rich.console import Console

from shared.course import figures as style
from shared.data.sources import Digests
from shared.data.prepare import DIGESTS
from shared.data.shards import TokenStore
from shared.devices import on_device
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.instructions import Task, read_tasks
from shared.loop import evaluate
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.preference.baseline import BaselinedLoader
from shared.preference.calibration import calibration_objective, draw_reliability, reliability
from shared.preference.log_probs import score_answers
from shared.preference.answer_scores import SCORES
from shared.preference.made_preferences import Judge, MadeSet, write_made
from shared.preference.objective import PreferenceObjective
from shared.preference.prepare import PreparedPairs, open_preferences, prepare_preferences
from shared.preference.reference import ReferencedLoader, Score, cached_reference, scorer
from shared.preference.reward_model import RewardObjective, as_reward_model
from shared.preference.rows import preference_loaders
from shared.rl.examination import GREEDY, Compared, generated
from shared.totals import Totals
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Judged, Run, prepared_once
from shared.trainer.models import first_scorer
from shared.trainer.modes.answering import Answering, Loaders, trained_parameters
from shared.trainer.modes.turns import require_trained_turns
from shared.trainer.weights import InitialWeights

SAMPLES = 8  # prompts whose answers are shown where nobody judges them


class Preferring(Answering):
    """Base of the modes reward, dpo and ppo: prepared pairs, and win rates by a hidden preference.

    Attributes:
        text: the prepared pairs.
        judge_of: the hidden preference's reward of an answer to a held-out prompt; None where there is no such preference.
    """

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        self.start, self.system = start, config.preferences.system
        self.judge_of: Judge | None = None

        def make() -> PreparedPairs:
            made, given = made_set(config), config.preferences
            sources = given.sources or (ChatSource(str(made.pairs)),)
            given = replace(given, sources=sources, tokenizer=given.tokenizer or start.tokenizer_folder())
            return prepare_preferences(given, config.data.prepared, config.data.seq, console)

        self.text: PreparedPairs = prepared_once(world, config.data.prepared, make, open_preferences)
        self.tokenizer = self.text.tokenizer
        agreed(world, lambda: start.require_extended(self.tokenizer))
        agreed(world, lambda: require_trained_turns(config, start, self.tokenizer))

    def require_answerable(self, config: TrainerConfig) -> None:
        made, file, most = made_set(config), config.preferences.made.file, config.preferences.made.prompts
        if most and (found := file or (made and made.held_out)):
            self.tasks = read_tasks(found, SCORES)[:most]
            self.require_room(config, self.tasks, found)
            self.judge_of = Judge(self.tasks)

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        report = self.text.report
        kind = "pairs" if report.paired else "answers with a label"
        amount = f"{report.examples:,} {kind} ({report.held_out:,} held out)"
        return amount, "".join(f"{line}\n" for line in [*report.lines()[1:3], *report.remarks()])

    def samples(self, run: Run, model: TransformerModel) -> list[tuple[str, str]]:
        """Prompts of held-out pairs with the answers of the trained model and of the first one, where no preference judges them."""
        if self.judge_of is not None:
            return []
        prompts, decode = prompts_of_pairs(self.text.held_out, SAMPLES), self.tokenizer.decode
        how = {"drawing": GREEDY, **self.limits(run.config)}
        before, after = (
            generated(each, prompts, run.config.report.new_tokens, decode, **how) for each in (self.first_model(run), model)
        )
        return [(decode(prompt), f"{new}\n\nbefore: {old}") for prompt, (old, _), (new, _) in zip(prompts, before, after, strict=True)]

    def check(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        """The hidden preference's reward of each answer."""
        return [self.judge_of(task.prompt, answer) for task, answer in zip(tasks, answers, strict=True)]

    def preferred(self, run: Run, model: TransformerModel) -> tuple[list[Compared], dict[str, float]]:
        """The answers to held-out prompts before and after training with their hidden rewards, and a summary of them; both empty if there
        is no hidden preference."""
        if self.judge_of is None:
            return [], {}
        found = self.compared(run, model)
        return found, {
            "win rate over the first model, by the hidden preference": fmean(each.won for each in found),
            "hidden preference's reward before": fmean(each.score_before for each in found),
            "hidden preference's reward after": fmean(each.score_after for each in found),
            "characters of an answer before": fmean(len(each.before) for each in found),
            "characters of an answer after": fmean(len(each.after) for each in found),
        }


def prompts_of_pairs(store: TokenStore, most: int | None = None) -> list[list[int]]:
    """The distinct prompts of prepared pairs. most: at most so many."""
    found: dict[tuple[int, ...], None] = {}
    for number in range(len(store)):
        if len(found) == most:
            break
        found[tuple(store.document(number)[: int(store.trained(number).argmax())].tolist())] = None
    return [list(prompt) for prompt in found]


def made_set(config: TrainerConfig) -> MadeSet | None:
    """The generated set of pairs; None where the run names its own."""
    return None if config.preferences.sources else write_made(config.data.prepared, config.preferences.made)


class PreferenceTuning(Preferring):
    """The mode dpo."""

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        super().__init__(config, start, world, console)
        self.objective = PreferenceObjective(config.dpo)
        self.score: Score | None = None

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[Iterable, Iterable]:
        if config.dpo.needs_reference:
            self.score = self.reference(config, strategy)
            if config.dpo.reference == "cached":
                self.text = self.cached(config, strategy)
        training, held_out = super().loaders(config, strategy)
        return self.with_reference(training, config, strategy), self.with_reference(held_out, config, strategy)

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        return preference_loaders(self.text, answers=config.dpo.loss == "kto", **self.sizes(config, strategy.mesh, held_out_rows))

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable:
        return self.with_reference(super().all_held_out(config, strategy), config, strategy)

    def with_reference(self, loader: Iterable, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable:
        """Wrap a loader so that batches have the reference's log-probabilities, unless the cache has put them into the rows."""
        if self.score is None or config.dpo.reference == "cached":
            return loader
        if config.dpo.loss == "kto":
            policy = scorer(strategy.model, autocast_objective(score_answers, config.precision))
            loader = BaselinedLoader(loader, self.score, policy, strategy.mesh.data)
        return ReferencedLoader(loader, self.score)

    def reference(self, config: TrainerConfig, strategy: ParallelStrategy) -> Score:
        """The scorer of reference log-probabilities: the model while it still has its initial weights, that model without its adapter, or a
        frozen copy."""
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

    def judge(self, run: Run, model: TransformerModel, totals: Totals) -> Judged:
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


class RewardModelling(Preferring):
    """The mode reward."""

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
        """A reward model generates nothing."""

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        return preference_loaders(self.text, whole=True, **self.sizes(config, strategy.mesh, held_out_rows))

    def judge(self, run: Run, model: TransformerModel, totals: Totals) -> Judged:
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
