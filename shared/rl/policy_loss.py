"""Chapter 12. GRPO's policy loss, with ratios of tokens (GRPO, DAPO) or of whole answers (GSPO), and KL estimators.

    ratio of a token       pi(token) / old(token)                                             token level (Shao et al. 2024, Yu et al. 2025)
    ratio of an answer     (pi(answer) / old(answer)) ^ (1 / its tokens)                      sequence level (Zheng et al. 2025)
"""

from typing import Literal

from torch import Tensor

from shared.course.binding import exercise

Level = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]


@exercise("12.grpo_policy_loss")
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


@exercise("12.kl_estimate")
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
