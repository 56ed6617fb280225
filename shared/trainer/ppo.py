"""Chapter 12. RLHF with PPO as a mode of the trainer: reinforcement learning from a reward model, with rollouts as the loader.

The policy begins as the model of start_from with a value head, answers the prompts of the pairs, and is rewarded by a reward model, or by
the hidden preference itself. What it is held near to is that first model, kept beside it, or the policy without its adapter.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback, Metrics
from shared.finetune.instructions import read_tasks
from shared.model.init import forget_files
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.parallelize import apply_parallel
from shared.parallel.strategy import ParallelStrategy
from shared.preference.made_preferences import SCORES, Judge
from shared.preference.ppo import PPOAdvantages, PPOObjective
from shared.preference.reward_model import open_reward_model, score
from shared.preference.answer_rows import Sample
from shared.preference.rewards import Reward, reward_of_texts
from shared.preference.rollout import Rollout
from shared.preference.rollouts import RolloutLoader, RolloutMetrics
from shared.preference.sampler import PlainSampler
from shared.preference.value_head import VALUE, token_scores, with_value_head
from shared.totals import Totals
from shared.trainer.answering import trained_parameters
from shared.trainer.axes import RUN_AXES
from shared.trainer.config import PolicyConfig, TrainerConfig
from shared.trainer.initial_weights import InitialWeights, find_reward_model
from shared.trainer.models import first_scorer
from shared.trainer.preferring import Preferring, made_set, prompts_of_pairs
from shared.trainer.report import Judged

if TYPE_CHECKING:
    from shared.trainer.run import Run

SHOWN = ("reward", "gold_reward", "kl_to_reference", "answer_tokens", "ended", "value_explains")  # of the metrics of a rollout


class PolicyOptimization(Preferring):
    """The mode ppo (`shared.trainer.modes.Mode`).

    Attributes:
        prompts: ids of what is answered. texts: the same as their tasks have them.
    """

    left_out = (f"{VALUE}.weight",)

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        super().__init__(config, start, world, console)
        self.objective = PPOObjective(config.ppo)
        self.rewards = agreed(world, lambda: reward_weights(config.ppo, self.tokenizer))
        tasks = read_tasks(made.training, SCORES) if (made := made_set(config)) else []
        self.gold = Judge(tasks) if tasks else None
        self.texts = [task.prompt for task in tasks]
        self.prompts = self.prompts_of(tasks) or prompts_of_pairs(self.text.training)
        self.measured: RolloutMetrics | None = None

    def more_weights(self) -> list[InitialWeights]:
        return [self.rewards] if self.rewards else []

    def shaped(self, model: TransformerModel) -> TransformerModel:
        return with_value_head(model)

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[RolloutLoader, None]:
        ppo, dtype = config.ppo, None if config.precision == "float32" else getattr(torch, config.precision)
        loader = RolloutLoader(
            strategy,
            self.prompts,
            sampler=PlainSampler(ppo.new_tokens, self.stops, ppo.temperature, multiple=strategy.mesh.tp.size),
            reward=self.reward(config, strategy),
            config=ppo,
            advantages=WatchedAdvantages(ppo, self.gold_of),
            seq=config.data.seq,
            micro_batch_size=config.data.micro_batch_size,
            seed=config.seed,
            reference=first_scorer(config, self.start, strategy, lambda model, batch: token_scores(model, batch, ppo.temperature)[0]),
            computed_in=dtype,
        )
        self.measured.loader = loader
        return loader, None

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> None:
        return None

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        self.measured = RolloutMetrics(None)
        return [self.measured]

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        by = f"the reward model {config.ppo.reward_model}" if config.ppo.reward == "model" else "the hidden preference"
        return f"{len(self.prompts):,} prompts to answer", f"Answers are rewarded by {by}.\n"

    def reward(self, config: TrainerConfig, strategy: ParallelStrategy) -> Reward:
        """What scores answers: the hidden preference on texts, or a reward model in the policy's layout on ids."""
        if self.rewards is None:
            return reward_of_texts(self.gold, self.texts, self.tokenizer.decode)
        device = next(strategy.module.parameters()).device
        plain = open_reward_model(self.rewards.folder, builders=MIXTURE).requires_grad_(False)
        judging = apply_parallel(plain, strategy.mesh, None, None, device, config.seed, RUN_AXES)
        forget_files(judging.module)

        def reward_model(samples: Sequence[Sample]) -> list[float]:
            return score(judging.model, [[*each.prompt_ids, *each.completion.ids] for each in samples])

        return reward_model

    def gold_of(self, rollout: Rollout) -> Metrics:
        """What the hidden preference says of a rollout's answers, where something else rewards them."""
        if self.gold is None or self.rewards is None:
            return {}
        return {"gold_reward": fmean(reward_of_texts(self.gold, self.texts, self.tokenizer.decode)(rollout.samples))}

    def judge(self, run: "Run", model: TransformerModel, totals: Totals | None) -> Judged:
        preferred, summary = self.preferred(run, model)
        last = {f"last rollout's {name.replace('_', ' ')}": value for name, value in self.measured.loader.metrics.items() if name in SHOWN}
        summary |= last | {"trained parameters": trained_parameters(model)}
        return Judged(summary, self.samples(run, model), preferred=preferred, unit="policy and value, per token")


class WatchedAdvantages(PPOAdvantages):
    """PPO's advantages, with more metrics of each rollout."""

    def __init__(self, config: PolicyConfig, more: Callable[[Rollout], Metrics]):
        super().__init__(config)
        self.more = more

    def __call__(self, rollout: Rollout) -> tuple[dict[str, Tensor], Metrics]:
        columns, metrics = super().__call__(rollout)
        return columns, metrics | self.more(rollout)


def reward_weights(config: PolicyConfig, tokenizer: TextTokenizer) -> InitialWeights | None:
    """The reward model; None where the hidden preference rewards.

    Raises:
        SettingError: it is none, or reads other tokens than the policy writes.
    """
    if config.reward == "gold":
        return None
    found = find_reward_model(config.reward_model)
    mine, theirs = (each.tokenizer.get_vocab(with_added_tokens=True) for each in (tokenizer, found.text_tokenizer()))
    if odd := sorted(token for token, number in mine.items() if theirs.get(token) != number):
        raise SettingError(
            f"ppo.reward_model is {config.reward_model}, which has another vocabulary than the policy: {odd[0]!r} is id {mine[odd[0]]} of "
            "the policy's. Give a reward model that began as the same model."
        )
    return found
