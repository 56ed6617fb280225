"""Chapter 11. Proximal policy optimization (PPO): policy gradients over several updates of one set of samples (Schulman et al. 2017).

The samples were drawn by an older policy, so each token's advantage is weighted by how much likelier the token is now: the ratio. Far from
1 the weighted advantages say little about the new policy, so PPO takes away what can be gained there.

    reward of token t      -kl * (log pi(t) - log reference(t)), and at the last token the answer's score on top
    advantages             GAE of these and the values, whitened over the whole rollout         returns   advantages before that + values
    loss of a token        the clipped policy loss + value_coefficient * the clipped value loss

Left out on purpose: a bonus for entropy, which language models that start from a good policy do without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.course.bounds import NonNegativeFloat, PositiveFloat, PositiveInt, UnitFloat, checked
from shared.course.errors import CourseError
from shared.engine.callbacks import Metrics
from shared.loss import IGNORED
from shared.preference.gae import generalized_advantages
from shared.preference.rollout import Rollout, RolloutConfig
from shared.preference.value_head import token_scores
from shared.totals import Batch, Totals

LARGEST_MOVE = 40.0  # nats: of a ratio beyond exp of it neither the gradient nor its square would be a float32, and 0 times it not 0
KL_STEP = 0.2  # by at most this share of itself an adaptive coefficient moves in a full horizon


@exercise("11.ppo_policy_loss")
def ppo_policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """PPO's clipped policy loss of each token: the negative of the objective that is to be as large as possible.

    The ratio says how many times as likely the token is now as it was when it was drawn, and the objective is ratio * A, with the
    advantage A, as long as the ratio lies between 1 - clip and 1 + clip. Beyond, nothing more can be gained: where leaving that range
    made the objective larger, it is what it is at the range's edge, and the gradient is 0. Where leaving it made the objective smaller,
    the whole loss counts, so that the gradient leads back (Schulman et al. 2017, section 3). With clip 0.2:

        ratio        1.5    0.5    1.5    0.5
        A              1      1     -1     -1
        objective    1.2    0.5   -1.5   -0.8

    Args:
        log_probs: any shape, each token's log-probability under the policy that is trained.
        old_log_probs: the same under the policy that drew the tokens. No gradient flows to them.
        advantages: how much better each token was than expected. No gradient flows to them.
        clip: how far the ratio may move from 1 before nothing more is gained, at least 0.

    Returns:
        The losses, of the same shape and dtype: neither summed nor averaged, because only the caller knows which tokens count.

    >>> log_probs, old = torch.tensor([1.5, 1.5, 0.5]).log(), torch.zeros(3)
    >>> ppo_policy_loss(log_probs, old, torch.tensor([1.0, -1.0, 1.0]), clip=0.2)
    tensor([-1.2000,  1.5000, -0.5000])
    """


@dataclass(frozen=True)
@checked
class PPOConfig(RolloutConfig):
    """PPO on answers: the fields of a rollout, and these.

    Args:
        clip: clip range of the probability ratio of a token (epsilon).
        value_clip: clip range of a value around the rollout's.
        value_coefficient: weight of the value loss; 0 leaves the value head as it is.
        gamma: discount of generalized advantage estimation (GAE).
        lam: lambda of GAE: the weight of later temporal differences in an advantage.
        kl_coefficient: weight of the KL penalty to the reference, per nat.
        target_kl: nats per answer to which the coefficient adapts (Ziegler et al. 2019, section 2.2); null for a fixed coefficient.
        kl_horizon: answers in which an adaptive coefficient moves by at most 20 %.
        unended_penalty: subtracted from the score of a truncated answer (without an end token).
        whiten: normalize the advantages of a rollout to mean 0 and deviation 1.
    """

    clip: PositiveFloat = 0.2
    value_clip: PositiveFloat = 0.2
    value_coefficient: NonNegativeFloat = 0.1
    gamma: UnitFloat = 1.0
    lam: UnitFloat = 0.95
    kl_coefficient: NonNegativeFloat = 0.05
    target_kl: PositiveFloat | None = None
    kl_horizon: PositiveInt = 10_000
    unended_penalty: NonNegativeFloat = 0.0
    whiten: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_kl is not None and self.kl_coefficient == 0:
            raise ValueError("kl_coefficient is 0, and target_kl would multiply it: give a positive number to begin with.")


class PPOAdvantages:
    """What PPO learns from a rollout: `advantages`, `returns` and `old_values` of each token.

    An answer that was cut off ends there like any other: its score judges what there is, and nothing follows. With the value of the state
    after it on top, as for an episode that is only interrupted, values would grow with every rollout.

    Args:
        watch: more metrics of a rollout.

    Attributes:
        kl_coefficient: the one in effect.

    Raises, when called:
        CourseError: no reward applies to an answer.
    """

    def __init__(self, config: PPOConfig, watch: Callable[[Rollout], Metrics] = lambda rollout: {}):
        self.config, self.kl_coefficient, self.watch = config, config.kl_coefficient, watch

    def __call__(self, rollout: Rollout) -> tuple[dict[str, Tensor], Metrics]:
        if rollout.scores.isnan().any():
            raise CourseError(
                "The reward gave None for an answer: PPO learns a value from each, and has no group to leave it out of. Return a number."
            )
        config, mask, values = self.config, rollout.mask, rollout.values
        rewards = token_rewards(rollout, self.kl_coefficient, config.unended_penalty)
        nothing = torch.zeros_like(rollout.scores)
        advantages = generalized_advantages(rewards, values, rollout.lengths, nothing, config.gamma, config.lam)
        returns = (advantages + values).where(mask, 0)
        unexplained = (returns - values)[mask].var(correction=0) / returns[mask].var(correction=0)
        metrics = {"kl_coefficient": self.kl_coefficient, "value_explains": 1 - unexplained.nan_to_num(nan=1.0, posinf=1.0).item()}
        if config.target_kl is not None:
            error = (rollout.log_probs - rollout.reference).sum(dim=1).mean().item() / config.target_kl - 1
            self.kl_coefficient *= 1 + min(max(error, -KL_STEP), KL_STEP) * len(rollout.lengths) / config.kl_horizon
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {"advantages": advantages, "returns": returns, "old_values": values}, metrics | self.watch(rollout)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient, "given": self.config.kl_coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient, unless this run is configured with another initial one."""
        if state.get("given", self.config.kl_coefficient) == self.config.kl_coefficient:
            self.kl_coefficient = state["kl_coefficient"]


def token_rewards(rollout: Rollout, kl_coefficient: float, unended_penalty: float = 0.0) -> Tensor:
    """[answers, time]: the KL penalty of each token (its sample, log pi - log reference), and at the last one the answer's score."""
    rewards = -kl_coefficient * (rollout.log_probs - rollout.reference)
    scores = rollout.scores - unended_penalty * ~rollout.ended
    return rewards.scatter_add(1, rollout.lengths[:, None] - 1, scores[:, None])


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the masked positions, 0 elsewhere. The variance is the unbiased one."""
    count = mask.sum()
    centered = (values - values.where(mask, 0).sum() / count).where(mask, 0)
    return centered * (centered.square().sum() / (count - 1).clamp(min=1) + 1e-8).rsqrt()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error of each value, or of the value that has moved no farther than `clip` from the old one: whichever is larger."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (held - returns).square())


class PPOObjective:
    """PPO's loss over the tokens of answers, in one pass through a model with a value head.

    The batch has `old_log_probs`, `advantages`, `returns` and `old_values`, all [rows, seq], beside the packed rows. Metrics, for each
    token: `policy_loss`, `value_loss`, `approximate_kl` to the policy that drew the answers (ratio - 1 - log ratio, which is never
    negative), `clip_fraction`, and `entropy` as its estimate -log pi of the drawn tokens.
    """

    def __init__(self, config: PPOConfig):
        self.config = config

    def __call__(self, model: nn.Module, batch: Batch) -> Totals:
        config, counted = self.config, batch["targets"] != IGNORED
        log_probs, values = token_scores(model, batch, config.temperature)
        old = batch["old_log_probs"].maximum(log_probs.detach() - LARGEST_MOVE)
        policy = ppo_policy_loss(log_probs, old, batch["advantages"], config.clip)
        value = clipped_value_loss(values, batch["old_values"], batch["returns"], config.value_clip)
        with torch.no_grad():
            moved = log_probs - old
            each = {
                "policy_loss": policy,
                "value_loss": value,
                "approximate_kl": moved.expm1() - moved,
                "clip_fraction": (moved.expm1().abs() > config.clip).to(policy.dtype),
                "entropy": -log_probs,
            }
            metrics = {name: numbers.detach().where(counted, 0).sum() for name, numbers in each.items()}
        losses = policy + config.value_coefficient * value
        return Totals(losses.where(counted, 0).sum(), counted.sum(), metrics)
