"""A feed-forward layer with a loss of its own, in little what chapter 09's router has: experts that are to be used equally often."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, add_auxiliary_loss
from shared.model.feed_forward import build_feed_forward
from shared.model.transformer import build_linear

CONFIG = ModelConfig(vocab_size=31, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=32)
COEFFICIENT = 0.3


class BalancedExperts(nn.Module):
    """Two experts and a router that is asked to use them equally often: per row, times the row's tokens, so that it is a sum."""

    needs_context = True

    def __init__(self, config: ModelConfig, builders: Builders, layer: int):
        super().__init__()
        self.router = build_linear("router", config.hidden_size, 2, False)
        self.experts = nn.ModuleList(build_feed_forward(config, builders, layer) for _ in range(2))
        self.loss = None  # for the tests alone

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        shares = self.router(x).softmax(dim=-1)
        self.loss = COEFFICIENT * balance_loss(shares, context.valid)
        x = add_auxiliary_loss(x, self.loss, context.loss_scale)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def balance_loss(shares: Tensor, valid: Tensor | None) -> Tensor:
    """Sum over rows of tokens * experts * sum over experts of (share of tokens) * (mean probability): [], from [batch, seq, E]."""
    valid = torch.ones(shares.shape[:2], dtype=torch.bool) if valid is None else valid
    tokens = valid.sum(dim=1).clamp(min=1)
    chosen = F.one_hot(shares.argmax(dim=-1), shares.shape[-1]) * valid.unsqueeze(-1)
    counts, mass = chosen.sum(dim=1), (shares * valid.unsqueeze(-1)).sum(dim=1)
    return (shares.shape[-1] * (counts * mass).sum(dim=-1) / tokens).sum()


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Prompts of different lengths do not count, as in supervised fine-tuning."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(31, (rows, 17), generator=generator)
    targets = ids[:, 1:].clone()
    for row, length in enumerate(torch.randint(1, 12, (rows,), generator=generator)):
        targets[row, :length] = -100
    return {"input_ids": ids[:, :-1], "targets": targets}
