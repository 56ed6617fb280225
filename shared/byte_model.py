"""Chapter 01. The smallest neural language model that is worth training: a window of bytes through two layers.

Each position sees the embeddings of the last `window` bytes, side by side, and predicts the next one (Bengio et al. 2003,
"A Neural Probabilistic Language Model", section 2, without the direct connections). It has the interface of every
later model, [batch, seq] ids to [batch, seq, vocab] logits, so the loop cannot tell them apart.
"""

import torch.nn.functional as F
from torch import Tensor, nn


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
