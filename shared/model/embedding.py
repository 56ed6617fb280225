"""Chapter 02. Both ends of the model: token ids into vectors, vectors into logits over the vocabulary."""

import torch
from torch import Tensor, nn

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
        """input_ids: [batch, seq]; positions: [seq] or [batch, seq]; token_type_ids: [batch, seq], None for all 0.

        Raises:
            ValueError: `length`, that of the whole sequence, passes the learned positions; or segments where there are none.
        """
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
    """[batch, seq, D] -> [batch, seq, vocab] logits. BERT's puts a layer with activation and norm before, a bias after."""

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
