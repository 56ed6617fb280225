"""Byte-level language models: a bigram table, and the smallest neural model that is worth training, a window through two layers.

The bigram table is the baseline. It is filled by counting and has the interface of a model: its logits are log-probabilities, so the
objective and `evaluate` measure it like any other. With smoothing a, P(next | current) = (count + a) / (total + a * vocab).

The neural model sees at each position the embeddings of the last `window` bytes, side by side, and predicts the next one (Bengio et
al. 2003, "A Neural Probabilistic Language Model", section 2, without the direct connections). It has the interface of every
later model, [batch, seq] ids to [batch, seq, vocab] logits, so the loop cannot tell them apart.
"""

import torch
import torch.nn.functional as F
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


class ByteModel(nn.Module):
    """A feed-forward language model over a window of bytes.

    Args:
        vocab_size: number of token ids.
        window: how many ids, the current one included, a prediction sees.
        embedding_size: size of an id's embedding.
        hidden_size: size of the two hidden layers.
        dropout: probability of zeroing a hidden unit in training.
    """

    def __init__(self, vocab_size: int = 256, window: int = 16, embedding_size: int = 32, hidden_size: int = 256, dropout: float = 0.0):
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.first = nn.Linear(window * embedding_size, hidden_size)
        self.second = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, vocab] logits. Position s depends on positions s - window + 1 to s only."""
        embedded = F.pad(self.embedding(input_ids), (0, 0, self.window - 1, 0))  # zeros before the first byte
        windows = embedded.unfold(1, self.window, 1).flatten(start_dim=2)  # [batch, seq, embedding * window]
        hidden = self.first(windows).tanh()
        hidden = hidden + F.gelu(self.second(hidden))
        return self.head(self.dropout(hidden))
