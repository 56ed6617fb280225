"""Your part of chapter 11. Write each body in place of its `raise` line, in any order.

    course check 11          checks what you wrote
    course hint 11.bradley_terry_loss    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


# A reward model's loss (10 min, difficulty 1 of 5)
def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0) -> Tensor:
    """The loss of each pair of rewards under the Bradley-Terry model, with an optional margin and centering.

    The loss is how surprising the choices are: the negative logarithm of the probability that the model gives to each, in nats. A margin
    asks for a larger difference where people were surer (Touvron et al. 2023, equation 2). Only differences decide the first term, so all
    rewards may drift together; centering adds so many times the square of their sum (Eisenstein et al. 2023, section 2).

    Args:
        chosen, rejected: [pairs], the rewards of the two answers, both of one float dtype. Left unchanged.
        margin: [pairs], of any float dtype, or None for 0.
        centering: how much a sum away from 0 costs.

    Returns:
        [pairs] in float32 (float64 for float64 rewards), computed in that dtype. Finite, with finite gradients, for differences of
        thousands. A pair's loss depends on no other pair.

    >>> bradley_terry_loss(torch.tensor([0.0, 2.0]), torch.tensor([0.0, -1.0]))          # log 2; log(1 + exp(-3))
    tensor([0.6931, 0.0486])
    >>> bradley_terry_loss(torch.tensor([2.0]), torch.tensor([-1.0]), margin=torch.tensor([3.0]), centering=0.5)   # log 2 + 0.5 * 1
    tensor([1.1931])
    """
    raise NotImplementedError("11.bradley_terry_loss: write this body")


# Log-probabilities of whole answers (15 min, difficulty 2 of 5)
def sequence_log_probs(token_log_probs: Tensor, counted: Tensor, documents: Tensor, count: int) -> Tensor:
    """Add up the log-probabilities of the tokens of each sequence in packed rows: sums, not means.

        sums[b, n] = sum of token_log_probs[b, s] over the counted positions s with documents[b, s] = n

    Args:
        token_log_probs: [batch, seq], any float dtype. A position that does not count may hold anything, also -inf or NaN, and gets a
            gradient of 0. Left unchanged.
        counted: [batch, seq] bool, the positions whose target belongs to an answer: prompts and padding do not count.
        documents: [batch, seq] int64, which sequence of its row a position belongs to; -1 for padding, where `counted` is False.
        count: how many sequences a row is given room for, more than any number in `documents`; it may be as large as seq.

    Returns:
        [batch, count] in float32 (float64 for float64 input), added up in that dtype; 0 for a sequence without counted positions, -inf for
        one in which a position that counts is -inf. Computed for all sequences at once, without a tensor [batch, seq, count].

    >>> token_log_probs = torch.tensor([[-9.0, -1.0, -2.0, -9.0, -4.0, float("-inf")]])
    >>> counted = torch.tensor([[False, True, True, False, True, False]])
    >>> sequence_log_probs(token_log_probs, counted, torch.tensor([[0, 0, 0, 1, 1, -1]]), count=3)
    tensor([[-3., -4.,  0.]])
    """
    raise NotImplementedError("11.sequence_log_probs: write this body")


# DPO's loss (10 min, difficulty 2 of 5)
def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The DPO loss of each pair (Rafailov et al. 2023, equation 7), with label smoothing (cDPO, Mitchell 2023).

    The implicit reward of an answer is beta times the logarithm of how much likelier the policy makes it than the reference does. The loss
    of a pair is the Bradley-Terry loss of the implicit rewards. With label smoothing it is the loss to expect if that share of the labels
    has chosen and rejected exchanged.

    Args:
        chosen, rejected: [pairs], each answer's log-probability under the policy: summed over its tokens.
        reference_chosen, reference_rejected: [pairs], the same under the frozen reference model. No gradient flows to them.
        beta: how much moving away from the reference costs; a positive number, often 0.1.
        label_smoothing: the probability that a label is wrong, at least 0 and less than 0.5.

    Returns:
        [pairs], in the dtype of the inputs. Finite, with finite gradients, for differences of thousands. A pair's loss depends on no other
        pair.

    >>> chosen, rejected = torch.tensor([-10.0]), torch.tensor([-30.0])
    >>> dpo_loss(chosen, rejected, chosen, rejected, beta=0.1)                  # the policy is the reference: log 2
    tensor([0.6931])
    >>> dpo_loss(chosen, rejected, torch.tensor([-20.0]), torch.tensor([-20.0]), beta=0.1)          # log(1 + exp(-2))
    tensor([0.1269])
    """
    raise NotImplementedError("11.dpo_loss: write this body")


# Generalized advantage estimation (25 min, difficulty 3 of 5)
def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, last_values: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """The generalized advantage estimate of each token of ragged answers (Schulman et al. 2016, equation 16).

        delta_t = r_t + gamma * V_(t+1) - V_t              what came, and the next state's value, against what was expected
        A_t = delta_t + (gamma * lam) delta_(t+1) + (gamma * lam)^2 delta_(t+2) + ...          up to the answer's last token

    Args:
        rewards: [answers, time], what each token was rewarded with. Answers begin at time 0; what stands behind an answer's end may be
            anything, also NaN, in `rewards` and in `values`, and does not matter.
        values: [answers, time], what was expected before each token.
        lengths: [answers] int64, tokens in each answer, 0 to time.
        last_values: [answers], the value of the state after the last token, which the caller chooses: 0 where nothing follows, as after an
            answer that ended, and the value model's estimate where the answer would have gone on. `rewards`, `values` and `last_values`
            have one float dtype.
        gamma: discount of the next state, 0 to 1.
        lam: how far differences are carried backwards, 0 to 1.

    Returns:
        [answers, time] in the dtype of `values`; 0 behind an answer's end. It carries no gradient. A loop over time is right, one over
        answers is not: all answers are computed together.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0, 99.0]]), torch.tensor([[0.5, 0.5, 0.5, 99.0]])
    >>> generalized_advantages(rewards, values, torch.tensor([3]), torch.tensor([0.0]), gamma=1.0, lam=0.5)   # deltas 0, 0, 0.5
    tensor([[0.1250, 0.2500, 0.5000, 0.0000]])
    """
    raise NotImplementedError("11.generalized_advantages: write this body")


# PPO's clipped loss (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("11.ppo_policy_loss: write this body")
