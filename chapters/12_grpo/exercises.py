"""Your part of chapter 12. Write each body in place of its `raise` line, in any order.

    course check 12          checks what you wrote
    course hint 12.cached_attention    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.preference import log_probs as preference_log_probs
from shared.rl.number_pattern import NUMBER


# Attention with a KV cache (30 min, difficulty 3 of 5)
def cached_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    used: int | None = None,
) -> Tensor:
    """Attention of new tokens over a KV cache, which takes in their keys and values.

    Row b of the cache holds `lengths[b]` tokens at the places 0, 1, ... Its new token i comes to the place lengths[b] + i, and attends to
    itself and to every place before it; with a window, to the last `window` places of these alone. What comes after a row's tokens is
    left over from earlier rows: finite numbers, up to 1e30 in size, which must have no effect. Query heads share key-value heads as in
    chapter 02's `grouped_query_attention`: head h uses key-value head h // (H / K). Scores of float64 inputs are float64.

    Args:
        queries: [rows, H, new, d], one or more new tokens of each row.
        keys, values: [rows, K, new, d] of the same tokens; K divides H. They, the queries and `lengths` are not changed.
        cached_keys, cached_values: [rows, K, places, d], the cache, perhaps views into a larger one. Changed in place, at the places of the
            new tokens alone. No gradient is asked of anything here.
        lengths: [rows] int64, the tokens that each row of the cache holds already; at least 0. The caller advances them.
        scale: what the scores are multiplied by.
        window: how many places a query looks at, itself included; None for all.
        used: the length of the longest row with its new tokens, from a caller who knows it; None to find it in `lengths`. A program that
            reads a number from a GPU waits for the GPU, here once in each layer: with `used` given, no number is read from a tensor, and
            everything stays on the device of `lengths`.

    Returns:
        [rows, H, new, d] in the dtype of `values`, for all rows, heads and tokens at once. Places behind the longest row cost neither
        memory nor time.

    Raises:
        ValueError: a row has no room for its new tokens. The cache is as it was.

    >>> cached_keys, cached_values = torch.full((1, 1, 4, 1), 99.0), torch.full((1, 1, 4, 1), 99.0)
    >>> token = torch.zeros(1, 1, 1, 1)
    >>> cached_attention(token, token, token + 4, cached_keys, cached_values, torch.tensor([0]), scale=1.0)
    tensor([[[[4.]]]])
    >>> cached_attention(token, token, token + 8, cached_keys, cached_values, torch.tensor([1]), scale=1.0)       # equal scores: the mean
    tensor([[[[6.]]]])
    >>> cached_values.flatten()
    tensor([ 4.,  8., 99., 99.])
    """
    raise NotImplementedError("12.cached_attention: write this body")


# Sampling, with log-probabilities (25 min, difficulty 3 of 5)
def draw_tokens(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row by inverting the cumulative distribution, after temperature, top-k and top-p (Holtzman et al. 2020).

    In this order: logits are divided by the temperature; top-k keeps the k likeliest tokens and those that are as likely as the k-th; top-p
    keeps of these, renormalised, the fewest likeliest whose probabilities reach `top_p`, which is at least one token. Of equally likely
    tokens those with the smaller ids count as likelier. What is kept is brought to a sum of 1. Then the kept tokens are laid side by side
    in the order of their ids, each as wide as its probability, and the token at the place `uniform` is drawn: the first one whose
    cumulative probability exceeds it. A token that may not be drawn never is, however close to 0 or 1 the place.

    Args:
        logits: [rows, vocab], any floating dtype; -inf for a token that may not be drawn. Left unchanged.
        uniform: [rows], random numbers in [0, 1).
        temperature: positive, however small, or 0: the likeliest token (of equal ones the first), whose probability is then 1.
        top_k: at least 1; None, or more than there are, for all tokens.
        top_p: above 0 and at most 1; None or 1 for all tokens.

    Returns:
        The tokens [rows] int64 and their log-probabilities [rows] float64, under the distribution that they were drawn from. Everything is
        computed by torch in float64, for all rows at once, without a tensor [rows, vocab, vocab].

    >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    >>> draw_tokens(logits, torch.tensor([0.6]))                        # 0.5 is passed, 0.5 + 0.3 is not: token 1, log 0.3
    (tensor([1]), tensor([-1.2040], dtype=torch.float64))
    >>> draw_tokens(logits, torch.tensor([0.6]), top_p=0.6)             # tokens 0 and 1 are kept, as 0.625 and 0.375: token 0, log 0.625
    (tensor([0]), tensor([-0.4700], dtype=torch.float64))
    >>> draw_tokens(logits, torch.tensor([0.6]), temperature=0.0)
    (tensor([0]), tensor([0.], dtype=torch.float64))
    """
    raise NotImplementedError("12.draw_tokens: write this body")


# A verifiable reward (15 min, difficulty 2 of 5)
def number_reward(answer: str, expected: str) -> float:
    """1.0 where the last number of an answer equals the expected one, as an exact rational, and 0.0 elsewhere. It never raises.

    What a number is need not be invented: `NUMBER.findall(text)` gives the numbers of a text, from left to right, as they are written, such
    as "72", "-1,234.50", ".5" or "3/4", and `NUMBER.fullmatch(text)` is None unless the text is one number as a whole.

    Args:
        answer: what a model wrote, anything at all: empty, very long, in another script.
        expected: one number; spaces around it do not matter. Something else equals no answer.

    Returns:
        0.0 where the answer has no number, or where its last one or the expected one divides by zero or has over 1,000 characters. The time
        grows with the length of the answer, not with its square.

    >>> number_reward("3 + 4 is 7.", "7"), number_reward("7 or 8", "7"), number_reward("x = 0.50", "1/2"), number_reward("seven", "7")
    (1.0, 0.0, 1.0, 0.0)
    """
    raise NotImplementedError("12.number_reward: write this body")


# Group-relative advantages (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("12.group_advantages: write this body")


# GRPO's clipped policy loss (25 min, difficulty 3 of 5)
def grpo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    answers: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    level: str = "token",
) -> Tensor:
    """GRPO's clipped policy loss of each token, over packed rows in which several answers stand.

    As in chapter 11's `ppo_policy_loss` the loss is -min(ratio * A, clipped ratio * A), and the ratio is clipped to between 1 - clip_low
    and 1 + clip_high: the two differ, because a token of probability 0.01 can rise to 0.0128 under 0.28, and one of 0.5 to 0.64 (Yu et al.
    2025, section 3.1). At level "token" the ratio is the token's own. At level "sequence" all tokens of an answer share one ratio, the
    exponential of the mean of log pi - log old over that answer's tokens, and its gradient reaches each of them (Zheng et al. 2025,
    equation 7).

    Args:
        log_probs: [rows, seq], each token's log-probability under the policy that is trained.
        old_log_probs: [rows, seq], the same under the policy that drew the tokens. No gradient flows to them.
        advantages: [rows, seq]. No gradient flows to them.
        answers: [rows, seq] int64, which of its row's answers a token belongs to, from 0 to seq - 1; -1 for a token of none, such as a
            prompt's. What the other three tensors hold there may be anything, inf and NaN included.
        clip_low, clip_high: how far the ratio may fall below 1, or rise above it, before nothing more is gained; at least 0.
        level: "token" or "sequence".

    Returns:
        [rows, seq], the losses of the tokens, 0 where there is none, in the dtype of `log_probs`, neither summed nor averaged. Computed by
        torch in at least float32, for all answers at once, without a tensor [rows, seq, seq]. Gradients at tokens of no answer are 0, also
        in a batch without answers.

    Raises:
        ValueError: another level.

    >>> log_probs, old = torch.tensor([[2.0, 0.5, 1.5]]).log(), torch.zeros(1, 3)
    >>> grpo_policy_loss(log_probs, old, torch.ones(1, 3), torch.tensor([[0, 0, -1]]))
    tensor([[-1.2800, -0.5000,  0.0000]])
    >>> grpo_policy_loss(log_probs, old, torch.ones(1, 3), torch.tensor([[0, 0, -1]]), level="sequence")       # 2 * 0.5 is 1
    tensor([[-1., -1.,  0.]])
    """
    raise NotImplementedError("12.grpo_policy_loss: write this body")


# KL estimators (15 min, difficulty 2 of 5)
def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """Estimators of the KL divergence KL(pi || reference) from tokens that pi drew (Schulman 2020, "Approximating KL divergence").

    With the log-ratio d = log reference - log pi of a drawn token:

        k1      the KL's own summand, log pi - log reference: right on average, often negative
        k2      half the square of d: never negative, wrong on average, a little
        k3      k1 plus a multiple of e^d - 1, whose mean over pi's tokens is 0: so right on average. The multiple is the only one with
                which no estimate is negative, whatever d is

    Which of them has the right gradient is another question, which the chapter asks.

    Args:
        log_probs: any shape, log-probabilities of drawn tokens under the policy. Gradients flow to them.
        reference: the same under the reference; -inf for a token that it calls impossible, of which every estimate is inf. No gradient
            flows to them.
        estimator: "k1", "k2" or "k3".

    Returns:
        The estimates, of the same shape, and of the dtype of `log_probs`. They are computed by torch in at least float32, for all tokens at
        once, and k3 is right also where d is small: to 1e-3 of itself at d = 1e-3 in float32.

    Raises:
        ValueError: another estimator.

    >>> log_probs, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    >>> [kl_estimate(log_probs, reference, each) for each in ("k1", "k2", "k3")]
    [tensor([ 0.6931, -0.6931]), tensor([0.2402, 0.2402]), tensor([0.1931, 0.3069])]
    """
    raise NotImplementedError("12.kl_estimate: write this body")
