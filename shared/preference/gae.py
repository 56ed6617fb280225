"""Chapter 11. Generalized advantage estimation (GAE): how much better each token was than the value model expected.

    delta_t = r_t + gamma * V_(t+1) - V_t              A_t = sum over l >= 0 of (gamma * lam)^l * delta_(t+l)

lam 1 compares what really came after a token with the value before it: no bias, much noise. lam 0 trusts the value of the next state:
little noise, and the bias of the value model (Schulman et al. 2016, equations 11 to 16).
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("11.generalized_advantages")
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
