"""Chapter 01. The baseline that a neural model has to beat: a table of which byte follows which.

The table is filled by counting and has the interface of a model: its logits are log-probabilities, so the objective and
`evaluate` measure it like any other. With smoothing a, P(next | current) = (count + a) / (total + a * vocab).
"""

import torch
from torch import Tensor, nn


class BigramModel(nn.Module):
    """Next-token log-probabilities from counted pairs.

    Args:
        counts: [vocab, vocab], counts[i, j] = how often j followed i.
        smoothing: added to every count, so that an unseen pair is improbable instead of impossible.
    """

    def __init__(self, counts: Tensor, smoothing: float = 0.1):
        super().__init__()
        smoothed = counts.double() + smoothing
        self.register_buffer("log_probabilities", (smoothed / smoothed.sum(dim=1, keepdim=True)).log().float())

    @classmethod
    def count(cls, stream: Tensor, vocab_size: int = 256, smoothing: float = 0.1) -> "BigramModel":
        """Count the pairs of neighbours in `stream` ([tokens], any integer dtype)."""
        pairs = stream[:-1].long() * vocab_size + stream[1:].long()
        return cls(torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, vocab_size), smoothing)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, vocab] log-probabilities."""
        return self.log_probabilities[input_ids]
