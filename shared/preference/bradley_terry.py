"""Chapter 11. The Bradley-Terry loss of a reward model: a pair of rewards as the probability that one answer is preferred to the other.

    P(chosen is preferred) = sigmoid(r_chosen - r_rejected)          (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("11.bradley_terry_loss")
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
