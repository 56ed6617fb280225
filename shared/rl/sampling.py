"""Chapter 12. Temperature, top-k and top-p (nucleus) sampling, with the log-probability of each drawn token.

Who learns from a token needs its probability under the distribution that it was drawn from: after the division by the temperature, and
after the tail was cut off and the rest brought to a sum of 1 again. Scores of the whole softmax would call a token less likely than it was.
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("12.draw_tokens")
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
