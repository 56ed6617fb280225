"""Chapter 12. RLHF with PPO as a mode of the trainer: reinforcement learning from a reward model, with rollouts as the loader.

The policy begins as the model of start_from with a value head, answers the prompts of the pairs, and is rewarded by a reward model, or by
the hidden preference itself. The reference that it stays close to is that first model, kept beside it, or the policy without its adapter.
"""

from statistics import fmean

from rich.console import Console

from shared.engine.callbacks import Metrics
from shared.finetune.instructions import read_tasks
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.preference.answer_scores import SCORES
from shared.preference.made_preferences import Judge
from shared.preference.ppo import PPOAdvantages, PPOObjective
from shared.preference.rewards import Reward, reward_of_texts
from shared.preference.rollout import Rollout
from shared.preference.rollouts import RolloutLoader
from shared.preference.value_head import VALUE, with_value_head
from shared.totals import Totals
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Judged, Run
from shared.trainer.modes.answering import trained_parameters
from shared.trainer.modes.pairs import Preferring, made_set, prompts_of_pairs
from shared.trainer.modes.rollouts import Rolling, reward_by, reward_weights
from shared.trainer.weights import InitialWeights

SHOWN = ("reward", "gold_reward", "kl_to_reference", "answer_tokens", "ended", "value_explains")  # of the metrics of a rollout


class PolicyOptimization(Rolling, Preferring):
    """The mode ppo.

    Attributes:
        prompts: ids of what is answered. texts: the same as their tasks have them.
    """

    left_out = (f"{VALUE}.weight",)

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        super().__init__(config, start, world, console)
        self.console, self.objective = console, PPOObjective(config.ppo)
        if config.ppo.reward == "model":
            self.rewards = agreed(world, lambda: reward_weights(config.ppo.reward_model, self.tokenizer, "ppo.reward_model"))
        tasks = read_tasks(made.training, SCORES) if (made := made_set(config)) else []
        self.gold = Judge(tasks) if tasks else None
        self.texts = [task.prompt for task in tasks]
        self.prompts = self.prompts_of(tasks) or prompts_of_pairs(self.text.training)

    def shaped(self, model: TransformerModel) -> TransformerModel:
        return with_value_head(model)

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[RolloutLoader, None]:
        reward = reward_by(self.rewards, config, strategy) if self.rewards else self.gold_reward
        advantages = PPOAdvantages(config.ppo, self.gold_of)
        return self.rollouts(
            RolloutLoader, config, strategy, config.ppo, True, prompts=self.prompts, reward=reward, advantages=advantages
        ), None  # fmt: skip

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        by = f"the reward model {config.ppo.reward_model}" if config.ppo.reward == "model" else "the hidden preference"
        return f"{len(self.prompts):,} prompts to answer", f"Answers are rewarded by {by}.\n"

    @property
    def gold_reward(self) -> Reward:
        return reward_of_texts(self.gold, self.texts, self.tokenizer.decode)

    def gold_of(self, rollout: Rollout) -> Metrics:
        """The hidden preference's mean reward of a rollout's answers, where a reward model rewards them."""
        if self.gold is None or self.rewards is None:
            return {}
        return {"gold_reward": fmean(self.gold_reward(rollout.samples))}

    def judge(self, run: Run, model: TransformerModel, totals: Totals | None) -> Judged:
        preferred, summary = self.preferred(run, model)
        summary |= self.last_rollout(SHOWN) | {"trained parameters": trained_parameters(model)}
        return Judged(summary, self.samples(run, model), preferred=preferred, unit="policy and value, per token")
