"""Solutions of chapter 11. Each body with the reason why it is written this way."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_log_probs(token_log_probs: Tensor, counted: Tensor, documents: Tensor, count: int) -> Tensor:
    """What does not count is chosen away before anything is added: times 0 it would turn -inf into NaN, in the sum or in the gradient."""
    wide = token_log_probs.to(torch.promote_types(token_log_probs.dtype, torch.float32)).where(counted, 0)
    return wide.new_zeros(len(wide), count).scatter_add(1, documents.clamp(min=0), wide)


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0) -> Tensor:
    """`logsigmoid` is one function, because the logarithm of a sigmoid that has rounded to 0 is -inf."""
    wide = torch.promote_types(chosen.dtype, torch.float32)
    chosen, rejected = chosen.to(wide), rejected.to(wide)
    difference = chosen - rejected if margin is None else chosen - rejected - margin.to(wide)
    return centering * (chosen + rejected).square() - F.logsigmoid(difference)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The prompt's number cancels in the difference, so no one has to know it."""
    difference = beta * ((chosen - reference_chosen.detach()) - (rejected - reference_rejected.detach()))
    return -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference)


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, last_values: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """From the last token to the first, each advantage is its own difference and a share of the one after it. The value that is carried
    along is that of the state after the answer until the answer's last token is reached."""
    rewards, values = rewards.detach(), values.detach()
    advantages, advantage, following = torch.zeros_like(values), torch.zeros_like(last_values), last_values.detach()
    for time in reversed(range(values.shape[1])):
        inside = time < lengths
        delta = rewards[:, time] + gamma * following - values[:, time]
        advantage = (delta + gamma * lam * advantage).where(inside, 0)
        following = values[:, time].where(inside, following)
        advantages[:, time] = advantage
    return advantages


def ppo_policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """The minimum of the two is right for both signs: clipping takes away a gain and never a loss."""
    ratio = (log_probs - old_log_probs.detach()).exp()
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
