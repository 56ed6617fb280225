"""Chapter 12. Rollouts in the trainer: what its modes with rollouts, ppo and grpo, have in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.model.init import forget_files
from shared.moe.builders import MIXTURE
from shared.parallel.parallelize import apply_parallel
from shared.parallel.planning.pipeline_costs import held_parts
from shared.parallel.strategy import ParallelStrategy
from shared.preference.rollout import RolloutConfig, Sample
from shared.preference.reward_model import open_reward_model, score
from shared.preference.rewards import Reward
from shared.preference.rollouts import RolloutLoader, RolloutMetrics
from shared.preference.value_head import token_scores
from shared.rl.generation import CachedSampler
from shared.trainer.config import TrainerConfig
from shared.trainer.models import RUN_AXES, first_scorer
from shared.trainer.planner.memory import cache_bytes, copies_weights, memory_of
from shared.trainer.weights import InitialWeights, find_reward_model


class Rolling:
    """Mixin of modes whose rows are rollouts, beside `Answering`.

    Attributes:
        rewards: the weights of a reward model, where one rewards.
        measured: what logs the metrics of rollouts.
        console: prints how sharded weights are gathered.
    """

    rewards: InitialWeights | None = None
    measured: RolloutMetrics | None = None
    console: Console

    def more_weights(self) -> list[InitialWeights]:
        return [self.rewards] if self.rewards else []

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> None:
        return None

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        self.measured = RolloutMetrics(None)
        return [self.measured]

    def rollouts(
        self,
        kind: type[RolloutLoader],
        config: TrainerConfig,
        strategy: ParallelStrategy,
        sizes: RolloutConfig,
        reference: bool,
        **parts: Any,
    ) -> RolloutLoader:
        """The loader. sizes: the mode's section. reference: whether to score with the first model. parts: further arguments of `kind`."""
        multiple = strategy.mesh.tp.size if config.parallel.sequence_parallel else 1
        fused = copies_weights(config, memory_of(next(strategy.module.parameters()).device))
        self.measured.loader = kind(
            strategy,
            sampler=CachedSampler(sizes.new_tokens, self.stops, rows=sizes.rows, multiple=multiple, fused=fused, **sizes.sampling),
            config=sizes,
            seq=config.data.seq,
            micro_batch_size=config.data.micro_batch_size,
            seed=config.seed,
            reference=first_scorer(config, self.start, strategy, lambda model, batch: token_scores(model, batch, sizes.temperature)[0])
            if reference
            else None,
            cache=max(cache_bytes(config, part) for part in held_parts(config.model, config.parallel)),
            say=lambda reason: self.console.print(reason, markup=False, highlight=False, soft_wrap=True),
            computed_in=None if config.precision == "float32" else getattr(torch, config.precision),
            **parts,
        )
        return self.measured.loader

    def last_rollout(self, shown: Sequence[str]) -> dict[str, float]:
        """Metrics of the last rollout, for a report's summary."""
        metrics = self.measured.loader.metrics
        return {f"last rollout's {name.replace('_', ' ')}": metrics[name] for name in shown if name in metrics}


def reward_weights(folder: Path, tokenizer: TextTokenizer, setting: str) -> InitialWeights:
    """The weights of a reward model. setting: what names it, such as ppo.reward_model."""
    found = find_reward_model(folder, setting)
    mine, theirs = (each.tokenizer.get_vocab(with_added_tokens=True) for each in (tokenizer, found.text_tokenizer()))
    if odd := sorted(token for token, number in mine.items() if theirs.get(token) != number):
        raise SettingError(
            f"{setting} is {folder}, which has another vocabulary than the policy: {odd[0]!r} is id {mine[odd[0]]} of the policy's. Give a "
            "reward model that began as the same model."
        )
    return found


def reward_by(weights: InitialWeights, config: TrainerConfig, strategy: ParallelStrategy) -> Reward:
    """A reward function that scores token ids with a reward model in the policy's layout. Every rank calls both."""
    device = next(strategy.module.parameters()).device
    plain = open_reward_model(weights.folder, builders=MIXTURE).requires_grad_(False)
    judging = apply_parallel(plain, strategy.mesh, None, None, device, config.seed, RUN_AXES)
    forget_files(judging.module)

    def reward_model(samples: Sequence[Sample]) -> list[float]:
        return score(judging.model, [[*each.prompt_ids, *each.completion.ids] for each in samples])

    return reward_model
