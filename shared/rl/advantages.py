"""Chapter 12. Group-relative advantages: how much better an answer is than the other answers to the same prompt (Shao et al. 2024).

PPO learns a value model to say what was to be expected of a prompt. GRPO asks the policy itself: the mean reward of several answers to that
prompt is the expectation.
"""

from typing import Literal

import torch
from torch import Tensor

from shared.course.binding import exercise

Scale = Literal["group", "batch", "none"]


@exercise("12.group_advantages")
def group_advantages(rewards: Tensor, group: int, scale: str = "group") -> Tensor:
    """Group-relative advantages: each answer's reward less the mean of its group, in units of a deviation (Shao et al. 2024, 4.1.2).

    An advantage says by how many deviations a reward lies above the mean of its group; 1e-4 is added to each deviation. The deviation is
    the unbiased one, over n - 1: with `scale` "group" that of the group's rewards, with "batch" that of all rewards (Liu et al. 2025 say
    why), and with "none" there is no division at all, not even by 1 + 1e-4. Where all answers of a group have the same reward, whatever it
    is, nothing is learned from them: their advantages are exactly 0. That holds for a group of one answer as well, and for rewards such as
    0.1, whose sum is rounded.

    Args:
        rewards: [answers] finite, any floating dtype; the answers to one prompt are neighbours. Left unchanged.
        group: answers to each prompt; it divides the answers.
        scale: "group", "batch" or "none".

    Returns:
        [answers] in the dtype of `rewards`; computed by torch in at least float32, for all groups at once, in a dozen tensors of
        this size at most.

    Raises:
        ValueError: the group does not divide the answers, or is below 1; another scale.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group=2)
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group=2, scale="none")
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """


def known_advantages(rewards: Tensor, group: int, scale: Scale) -> Tensor:
    """`group_advantages` among the answers that have a reward; 0 for the others, whose reward is NaN."""
    known = ~rewards.isnan()
    if known.all():
        return group_advantages(rewards, group, scale)
    advantages = torch.zeros_like(rewards)
    for first in range(0, len(rewards), group):
        if len(answers := first + known[first : first + group].nonzero().flatten()) > 1:
            advantages[answers] = group_advantages(rewards[answers], len(answers), "none" if scale == "batch" else scale)
    return advantages / (rewards[known].std() + 1e-4) if scale == "batch" and known.sum() > 1 else advantages


def differing(scores: Tensor, group: int) -> Tensor:
    """[groups] bool: whether the answers to a prompt differ in their scores, NaN apart. Otherwise only an overlong penalty, or KL in the
    reward, tells one from another."""
    groups = scores.reshape(-1, group)
    known = ~groups.isnan()
    return groups.where(known, -torch.inf).amax(dim=1) > groups.where(known, torch.inf).amin(dim=1)
