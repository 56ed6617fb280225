"""Chapter 11. Direct preference optimization (DPO, Rafailov et al. 2023) and its relatives, as losses of log-probabilities.

The best policy under a reward r and a KL penalty beta is pi(y | x) = ref(y | x) exp(r(x, y) / beta) / Z(x). Read backwards, every policy
stands for a reward, beta * log(pi / ref), up to a number that depends on the prompt alone and cancels between two answers to one prompt.
So the Bradley-Terry loss can be put on the policy itself.

    loss     compares                                     needs a reference    what it changes about DPO
    cDPO     as DPO (`dpo_loss`, label_smoothing)         yes                  labels may be wrong: asks for a margin, not for more and more
    robust   as DPO                                       yes                  the same, unbiased: the noise is subtracted in expectation
    IPO      as DPO                                       yes                  a square around a margin of 1 / (2 beta)
    hinge    as DPO                                       yes                  nothing is gained beyond a margin of 1 / beta
    SimPO    means over the answers' tokens               no                   a margin is asked for instead
    ORPO     odds of the answers, by means over tokens    no                   a term beside the loss of supervised fine-tuning
    KTO      one answer with how it usually fares         yes                  no pairs: single answers, wanted or not

All take and return [...] tensors of one shape, in the dtype of the inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.binding import exercise


@exercise("11.dpo_loss")
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


def ipo_loss(difference: Tensor, beta: float) -> Tensor:
    """The IPO loss (Azar et al. 2023, equation 17, with beta for tau). difference: of the two answers' log(policy / reference)."""
    return (difference - 1 / (2 * beta)).square()


def robust_dpo_loss(difference: Tensor, label_smoothing: float) -> Tensor:
    """The robust DPO loss (Chowdhury et al. 2024, equation 12): its mean over labels of which that share is wrong is DPO's over right ones.
    It may be negative. difference: of the two answers' implicit rewards."""
    return (label_smoothing * F.logsigmoid(-difference) - (1 - label_smoothing) * F.logsigmoid(difference)) / (1 - 2 * label_smoothing)


def hinge_loss(difference: Tensor) -> Tensor:
    """The hinge loss on implicit rewards (Zhao et al. 2023, SLiC-HF, in the form of Liu et al. 2023, RSO, equation 11)."""
    return (1 - difference).relu()


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, target_margin: float) -> Tensor:
    """The SimPO loss (Meng et al. 2024, equation 6), with gamma as target_margin. chosen, rejected: mean log-probabilities of a token."""
    return -F.logsigmoid(beta * (chosen - rejected) - target_margin)


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """The ORPO loss (Hong et al. 2024, equation 6, with beta for lambda): the chosen answer's loss, and beta times the odds ratio's.

    Args:
        chosen, rejected: mean log-probabilities of a token, at most 0.
    """
    return -chosen - beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(log_probability). p is held just below 1, where the odds have no end."""
    log_probability = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    return log_probability - torch.log(-torch.expm1(log_probability))


def kto_loss(
    log_ratio: Tensor, desirable: Tensor, baseline: Tensor, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """The KTO loss of single answers (Ethayarajh et al. 2024, equation 8): people weigh a gain and a loss from where they stand.

    Args:
        log_ratio: of each answer, log(policy / reference).
        desirable: bool, whether the answer is wanted.
        baseline: the estimate of KL(policy || reference), at least 0: an answer must gain more than other answers do. No gradient flows to
            it.
        desirable_weight, undesirable_weight: what the loss of either kind is multiplied by, to make up for uneven numbers.
    """
    gain = beta * (log_ratio - baseline.detach())
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))
