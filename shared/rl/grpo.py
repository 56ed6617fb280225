"""Chapter 12. Group relative policy optimization (GRPO) and its variants DAPO, Dr. GRPO and GSPO: advantages, loss, dynamic sampling.

    reward of an answer    its score - what being overlong costs - kl_coefficient * its KL estimate, with kl_in "reward"
    advantage              the same for all its tokens: better or worse than the other answers to the prompt (`group_advantages`)
    loss of a token        `grpo_policy_loss`, + kl_coefficient * its KL estimate, with kl_in "loss"
    loss of a step         sum of weight * loss of a token / answers of the step

The weights say what is averaged over, and are a column of the batch. So a step is divided once, by the number of its answers, and its
gradient is the same however the answers are cut into micro-batches and ranks:

    token       1 / mean tokens of the rollout's answers          each token counts alike (DAPO, Yu et al. 2025)
    sequence    1 / tokens of the answer                          each answer counts alike (GRPO, Shao et al. 2024)
    constant    1 / new_tokens                                    as `token`, and no length is divided by (Dr. GRPO, Liu et al. 2025)

In the first step after a rollout all ratios are 1, and the advantages of a group add up to 0. With `sequence` the loss is then 0, and near
to it otherwise; its gradient is that of the ratios, and not 0.

Answers of a group that are all right, or all wrong, have no advantage over one another, and teach nothing. Dynamic sampling (Yu et al.
2025, `GroupLoader`) samples answers to further prompts while too few groups have differing rewards.

Left out on purpose: a bonus for entropy, clipping from above of ratios with a negative advantage, and stop strings in rollouts: an answer
that a string ends has drawn no token that ends it, and would not learn to.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from shared.course.bounds import Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, checked
from shared.course.errors import CourseError
from shared.engine.callbacks import Metrics
from shared.loss import IGNORED
from shared.preference.log_probs import sequence_log_probs, token_shares
from shared.preference.ppo import LARGEST_MOVE
from shared.preference.rollout import OpenRollout, Rollout, RolloutConfig, Sample, scores_of
from shared.preference.rollouts import RolloutLoader
from shared.preference.value_head import token_scores
from shared.rl import advantages as group_relative, policy_loss
from shared.rl.advantages import Scale
from shared.rl.generation import Drawing
from shared.rl.policy_loss import Estimator, Level
from shared.totals import Batch, Totals

Aggregation = Literal["token", "sequence", "constant"]
OWN_SAMPLES = 0.02  # nats for each token by which the sampler's log-probabilities may differ from the trainer's on average


@dataclass(frozen=True)
@checked
class GRPOConfig(RolloutConfig):
    """GRPO on answers: the fields of a rollout, of which `answers` is the size of a group, and these.

    Args:
        clip_low: clip range of the probability ratio below 1. Ratios of whole answers move far less than those of
            tokens: 0.0003 for level sequence (Zheng et al. 2025).
        clip_high: clip range above 1: that of DAPO, where TRL's default is `clip_low`; 0.0004 for level sequence.
        level: clip the ratio of a token, or of a whole answer (GSPO).
        scale: divide advantages by the deviation of the group or of the batch, or by nothing.
        aggregation: the loss is a mean over tokens, over sequences, or divided by a constant.
        kl_coefficient: weight of the KL penalty to the reference, per nat; 0 needs no reference.
        kl_estimator: estimator of the KL divergence to the reference.
        kl_in: loss, or reward. The gradient of the divergence over whole answers comes with reward and k1.
        kl_times_ratio: multiply the estimate in the loss by the token's ratio. Its gradient is then that of each token's divergence;
            without the ratio that of k1 is 0 on average, and that of k3 another one.
        mask_truncated: learn nothing from answers that were cut off. They count as answers of a mean all the same.
        overlong_tokens: in the last so many of new_tokens an answer loses more of its reward with each token (DAPO).
        overlong_penalty: penalty of an answer of new_tokens tokens.
        rounds: how often prompts are drawn for a rollout at most, while groups are missing whose rewards differ (dynamic sampling); 1 takes
            what comes first.
        importance_limit: multiply a token's advantage by its probability under the trainer over that under the sampler, at most this; null
            where they are one policy in one precision.
        top_k: draw from so many likeliest tokens; null for all. This and the next three change what is drawn from, and not what is trained:
            they need importance_limit. Tokens that are cut off are never drawn, so nothing is learned about them.
        top_p: nucleus sampling: sample from the most likely tokens that reach this probability together; null for all.
        min_p: sample from tokens of at least this share of the most likely one's probability; null for all.
        repetition_penalty: divides positive logits of tokens that the text already has; 1 for none.
    """

    answers: Annotated[int, Bounds(ge=2, le=10_000)] = 8
    passes: PositiveInt = 1
    clip_low: Share = 0.2
    clip_high: PositiveFloat = 0.28
    level: Level = "token"
    scale: Scale = "group"
    aggregation: Aggregation = "token"
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_times_ratio: bool = False
    mask_truncated: bool = False
    overlong_tokens: NonNegativeInt = 0
    overlong_penalty: NonNegativeFloat = 0.0
    rounds: Annotated[int, Bounds(ge=1, le=1_000)] = 1
    importance_limit: Annotated[float, Bounds(ge=1)] | None = None
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            (self.kl_times_ratio and self.kl_in == "reward", "kl_times_ratio is for kl_in loss, which is differentiated: leave it out."),
            (
                self.overlong_tokens > self.new_tokens,
                f"overlong_tokens is {self.overlong_tokens} of new_tokens {self.new_tokens}: give from 0 to as many.",
            ),
            (
                (self.overlong_tokens > 0) != (self.overlong_penalty > 0),
                "overlong_tokens and overlong_penalty belong together, and one of them is 0: give both, or none.",
            ),
            (
                self.drawing != Drawing(self.temperature) and self.importance_limit is None,
                "top_k, top_p, min_p or repetition_penalty changes the distribution that tokens are drawn from, and the trainer scores "
                "them under the policy's own: give importance_limit, such as 2, which weighs the difference, or leave them out.",
            ),
        ]
        for is_wrong, reason in wrong:
            if is_wrong:
                raise ValueError(reason)

    @property
    def drawing(self) -> Drawing:
        return Drawing.of(self)

    @property
    def sampling(self) -> dict[str, Any]:
        return asdict(self.drawing)


class GRPOAdvantages:
    """What GRPO learns from a rollout (`shared.preference.rollout.Advantages`).

    Columns, [answers, time]: `advantages`; `weights`, what each token counts; `starts`, 1 at the first token of each answer, which are
    counted; and `reference`, its log-probabilities, where the loss has a term of it.

    An answer that no reward applies to counts in no mean and no deviation, and its advantage is 0.

    Metrics: `zero_variance`, the share of groups whose answers all have the same score, or none; `without_reward`, the share of answers
    that no reward applies to; `entropy`, estimated by -log pi of the tokens; `sampler_ratio`, the mean of a token's probability under the
    trainer over that under the sampler. It is 1 where both are one policy. Where the sampler cuts off a tail (top-k, top-p), and the
    trainer does not, it is the probability that was kept, less than 1.

    Raises, when called:
        CourseError: the sampler drew from another distribution than the trainer scores, and there is no importance_limit.
    """

    def __init__(self, config: GRPOConfig):
        self.config = config

    def __call__(self, rollout: Rollout) -> tuple[dict[str, Tensor], Metrics]:
        config, mask = self.config, rollout.mask
        moved = (rollout.log_probs - rollout.sampled).where(mask, 0)
        if config.importance_limit is None:
            require_own_samples(moved[mask].mean().item())
        advantages = group_relative.known_advantages(self.rewards(rollout), rollout.group, config.scale)
        columns = {"advantages": advantages[:, None].where(mask, 0), "weights": self.weights(rollout)}
        if config.importance_limit is not None:
            columns["advantages"] = columns["advantages"] * moved.exp().clamp(max=config.importance_limit)
        columns["starts"] = (torch.arange(mask.shape[1]) == 0).long().expand(mask.shape)
        if config.kl_coefficient and config.kl_in == "loss":
            columns["reference"] = rollout.reference
        metrics = {
            "zero_variance": 1 - group_relative.differing(rollout.scores, rollout.group).double().mean().item(),
            "without_reward": rollout.scores.isnan().double().mean().item(),
            "entropy": -rollout.log_probs[mask].mean().item(),
            "sampler_ratio": moved[mask].exp().mean().item(),
        }
        return columns, metrics

    def rewards(self, rollout: Rollout) -> Tensor:
        """[answers]: the scores, less what an overlong answer costs (Yu et al. 2025, equation 13), and what moving away costs."""
        config, rewards = self.config, rollout.scores
        if config.overlong_tokens:
            over = (rollout.lengths - (config.new_tokens - config.overlong_tokens)).clamp(min=0) / config.overlong_tokens
            rewards = rewards - config.overlong_penalty * over
        if config.kl_coefficient and config.kl_in == "reward":
            kl = policy_loss.kl_estimate(rollout.log_probs, rollout.reference, config.kl_estimator)
            rewards = rewards - config.kl_coefficient * kl.where(rollout.mask, 0).sum(dim=1)
        return rewards

    def weights(self, rollout: Rollout) -> Tensor:
        """[answers, time]; 0 for a token that teaches nothing. Where none of a rollout does, all are 0."""
        config, counted = self.config, rollout.mask & (rollout.ended[:, None] | (not self.config.mask_truncated))
        lengths = {
            "token": counted.sum().to(rollout.scores.dtype) / len(counted),
            "sequence": rollout.lengths[:, None],
            "constant": torch.tensor(config.new_tokens),
        }[config.aggregation]
        return (1 / lengths.to(rollout.scores.dtype)).where(counted, 0)


class GRPOObjective:
    """GRPO's loss over the tokens of answers; what is divided by is the number of answers.

    The batch has `old_log_probs` and the columns of `GRPOAdvantages`, all [rows, seq], beside the packed rows. Metrics, each a mean over
    the tokens of an answer, and then over answers: `approximate_kl` to the policy that drew the answers, `clip_fraction` (tokens whose
    ratio has moved so far that their advantage gives no gradient any more), `entropy` as its estimate -log pi of the drawn tokens, and
    `kl` to the reference, where the loss has it.
    """

    def __init__(self, config: GRPOConfig):
        self.config = config

    def __call__(self, model: nn.Module, batch: Batch) -> Totals:
        config, counted = self.config, batch["targets"] != IGNORED
        shares = token_shares(batch["targets"], batch["documents"], 1)
        log_probs = token_scores(model, batch, config.temperature, shares)[0].where(counted, 0)
        old = batch["old_log_probs"].where(counted, 0).maximum(log_probs.detach() - LARGEST_MOVE)
        answers = batch["documents"].where(counted, -1)
        losses = policy_loss.grpo_policy_loss(
            log_probs, old, batch["advantages"], answers, config.clip_low, config.clip_high, config.level
        )  # fmt: skip
        metrics = self.metrics(log_probs.detach(), old, batch["advantages"], answers, shares)
        if config.kl_coefficient and config.kl_in == "loss":
            reference = batch["reference"].where(counted, 0).minimum(log_probs.detach() + LARGEST_MOVE)
            kl = policy_loss.kl_estimate(log_probs, reference, config.kl_estimator)
            metrics["kl"] = (kl.detach() * shares).sum()
            losses = losses + config.kl_coefficient * (kl * (log_probs - old).exp() if config.kl_times_ratio else kl)
        loss = (losses * batch["weights"].where(counted, 0)).sum()
        return Totals(loss, batch["starts"].where(counted, 0).sum(), metrics)

    def metrics(self, log_probs: Tensor, old: Tensor, advantages: Tensor, answers: Tensor, shares: Tensor) -> dict[str, Tensor]:
        config, moved, counted = self.config, log_probs - old, answers >= 0
        approximate = moved.expm1() - moved
        if config.level == "sequence":
            moved = sequence_log_probs(moved * shares, counted, answers, answers.shape[1]).gather(1, answers.clamp(min=0))
        ratio = moved.exp()
        spent = ((ratio > 1 + config.clip_high) & (advantages > 0)) | ((ratio < 1 - config.clip_low) & (advantages < 0))
        each = {"approximate_kl": approximate, "clip_fraction": spent.to(ratio), "entropy": -log_probs}
        return {name: (values * shares).where(counted, 0).sum() for name, values in each.items()}


def require_own_samples(moved: float) -> None:
    """Reject answers that another policy sampled. moved: log-probability under the trainer less that of the sampler, mean over tokens."""
    if not abs(moved) <= OWN_SAMPLES:
        raise CourseError(
            f"The sampler's log-probabilities differ from the trainer's by {moved:+.3f} nats a token: it draws from another distribution, "
            "by its temperature, top_k, top_p or precision. Let both be the same, or give importance_limit, which weighs the difference."
        )


class GroupLoader(RolloutLoader):
    """The loader of a `GRPOConfig`'s rollouts: up to `rounds` times it samples answers to as many prompts as a rollout has.

    Groups whose scores differ are kept, in the order of their prompts; surplus groups are discarded. If there are too few in the end,
    groups of the last round fill the rollout. The position holds which prompts come next, so a resumed run continues as any other.

    Metrics in addition to the rollout's: `rounds`, and `zero_variance`, of all groups that were drawn.
    """

    config: GRPOConfig

    def answered(self, device: torch.device) -> list[Sample]:
        size, wanted, kept, drawn = self.config.answers, self.config.prompts, [], 0
        for number in range(self.config.rounds):
            if number:
                self.position += wanted
            try:
                samples = super().answered(device)
            except CourseError:
                self.position -= number * wanted  # a resumed run samples this rollout again, from its first prompts
                raise
            groups = [samples[first : first + size] for first in range(0, len(samples), size)]
            differ = group_relative.differing(scores_of(samples, torch.float64), size).tolist()
            drawn += sum(differ)
            kept += [group for group, varied in zip(groups, differ, strict=True) if varied]
            if len(kept) >= wanted:
                break
        kept = [*kept, *(group for group, varied in zip(groups, differ, strict=True) if not varied)][:wanted]
        self.rounds = {"rounds": number + 1, "zero_variance": 1 - drawn / (wanted * (number + 1))}
        return [sample for group in kept for sample in group]

    def roll_out(self) -> OpenRollout:
        opened = super().roll_out()
        opened.metrics |= self.rounds
        if self.reference is None:
            del opened.metrics["kl_to_reference"]  # 0, and not measured
        return opened
