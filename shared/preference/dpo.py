"""Chapter 11. Direct preference optimization (DPO): learn from pairs without a reward model (Rafailov et al. 2023).

The best policy under a reward r and a KL penalty beta is pi(y | x) = ref(y | x) exp(r(x, y) / beta) / Z(x). Read backwards, every policy
stands for a reward, beta * log(pi / ref), up to a number that depends on the prompt alone and cancels between two answers to one prompt.
So the Bradley-Terry loss can be put on the policy itself.
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("11.dpo_loss")
def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The DPO loss of each pair (Rafailov et al. 2023, equation 7), with label smoothing (cDPO, Mitchell 2023).

    The implicit reward of an answer is beta times the logarithm of how much likelier the policy makes it than the reference does. With
    the difference d of the two answers' implicit rewards,

        loss = -(1 - label_smoothing) * log sigmoid(d) - label_smoothing * log sigmoid(-d)

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
