"""Chapter 02. Embedding and language-model head, tied or not: token ids to vectors, vectors to logits, and the losses' work on logits."""

import torch
from torch import Tensor, nn

from shared.loss import IGNORED, cross_entropy
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.feed_forward import ACTIVATIONS


class Embedding(nn.Module):
    """Token embeddings, and those of positions and segments where the configuration has them: ids -> [batch, seq, D]."""

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        learned = config.position == "learned"
        self.tokens = builders.embedding("tokens", config.vocab_size, config.hidden_size)
        self.positions = builders.embedding("positions", config.max_position_embeddings, config.hidden_size) if learned else None
        self.types = builders.embedding("types", config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.norm = builders.norm(config, config.hidden_size) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout) if config.hidden_dropout else nn.Identity()
        self.longest = config.max_position_embeddings

    def forward(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None, length: int) -> Tensor:
        """input_ids: [batch, seq]; positions: [seq] or [batch, seq]; token_type_ids: [batch, seq], None for all 0."""
        x = self.tokens(input_ids)
        if self.types is None and token_type_ids is not None:
            raise ValueError("token_type_ids were given to a model without segment embeddings: set type_vocab_size, or leave them out.")
        if self.types is not None:
            x = x + self.types(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        if self.positions is not None:
            if length > self.longest:
                raise ValueError(f"The sequence has {length} positions, and only {self.longest} are learned (max_position_embeddings).")
            x = x + self.positions(positions)
        return self.dropout(x if self.norm is None else self.norm(x))


class Head(nn.Module):
    """The language-model head: [batch, seq, D] -> logits [batch, seq, vocab]. BERT's has a layer with activation and norm before it.

    Losses ask `scores` for whatever they compute from logits, so that a head of which each rank holds a part of the vocabulary can return
    scores of its own: `chunked_loss` and `token_log_probs` call nothing else.
    """

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        self.scale, self.vocab_size = config.logit_scale, config.vocab_size
        mlm = config.head == "mlm"
        self.transform = builders.linear("transform", config.hidden_size, config.hidden_size, True) if mlm else None
        self.norm = builders.norm(config, config.hidden_size) if mlm else None
        self.activation = ACTIVATIONS[config.hidden_act]
        self.linear = builders.linear("head", config.hidden_size, config.vocab_size, mlm)

    def forward(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            x = self.norm(self.activation(self.transform(x)))
        return self.linear(x if self.scale == 1.0 else x * self.scale)

    def scores(self, logits: Tensor, targets: Tensor) -> "TargetScores":
        """What losses compute from the logits that `forward` returned."""
        return TargetScores(logits, targets)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary, from what `forward` returned."""
        return logits


class TargetScores:
    """What losses compute from logits: the cross-entropy, its gradient, and how many targets had the largest logit.

    Args:
        logits: [rows, vocab].
        targets: [rows] int64; -100 does not count.
    """

    def __init__(self, logits: Tensor, targets: Tensor):
        self.logits, self.targets, self.counted = logits, targets, targets != IGNORED
        self.dtype = torch.promote_types(logits.dtype, torch.float32)  # in which softmax and losses are computed

    def cross_entropy(self) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of targets, both []."""
        return cross_entropy(self.logits, self.targets)

    def token_losses(self) -> Tensor:
        """The loss of each target: [rows], in float32 at least; 0 where a target does not count. Its sum is that of `cross_entropy`."""
        return nn.functional.cross_entropy(self.logits.to(self.dtype), self.targets, ignore_index=IGNORED, reduction="none")

    def gradient(self) -> Tensor:
        """The gradient of the summed cross-entropy: softmax(logits) - one_hot(target), and 0 where a target does not count.

        Returns:
            [rows, vocab] in the dtype of the logits, computed in float32 at least.
        """
        gradient = self.logits.softmax(dim=-1, dtype=self.dtype)
        counted = self.counted.unsqueeze(-1)
        gradient.scatter_add_(-1, self.targets.unsqueeze(-1).where(counted, 0), -counted.to(gradient.dtype))
        return gradient.mul_(counted).to(self.logits.dtype)

    def count_correct(self) -> Tensor:
        """How many targets had the largest logit: []."""
        target_logits = self.logits.gather(-1, self.targets.where(self.counted, 0).unsqueeze(-1)).squeeze(-1)
        return (self.counted & (target_logits == self.logits.amax(dim=-1))).sum()
