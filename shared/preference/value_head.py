"""Chapter 11. Value head: a second head on a language model's trunk, which says for each position what reward is still to be expected.

The value of a position is a product of its hidden state with one vector. The language-model head stays as it is and has the value head
as a module within it (`head.value`), so that an objective's `head_fn` reaches both, in one pass through the model, also in a pipeline.

Left out on purpose: a value model of its own, which is a second transformer to hold, to update and to save.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.loss import IGNORED
from shared.model.chunked_loss import apart
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.preference.log_probs import answer_log_probs
from shared.totals import Batch

VALUE = "head.value"


class ScalarProjection(nn.Module):
    """A product with one vector, `weight` [1, D]: a number for each position, [..., D] -> [...], in float32 at least, also under autocast.

    Under tensor parallelism every rank computes it whole, from the same hidden states. The operator f before the head adds up their
    gradients over the ranks, so that each rank passes on its share of this layer's.

    Args:
        features: D.
        placed: the weight's dtype and device.

    Its weights are zeros at first.
    """

    def __init__(self, features: int, **placed: Any):
        super().__init__()
        self.copies = 1
        self.weight = nn.Parameter(torch.zeros(1, features, **placed))
        self.weight.role = "embedding"  # AdamW's: one row is no matrix to orthogonalize
        self.weight.initializer = lambda shape, generator: torch.zeros(shape)

    def over_ranks(self, group: Communicator, leave: Callable[[Tensor], Tensor] | None = None) -> None:
        """Called by tensor parallelism."""
        self.copies = group.size

    def forward(self, x: Tensor) -> Tensor:
        if self.copies > 1 and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient / self.copies)
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype)).squeeze(-1)


def with_value_head(model: TransformerModel) -> TransformerModel:
    """Give a decoder a value head, in place, which is trained. Its weights are zeros: at first every value is 0.

    Args:
        model: whole and plain, before `apply_parallel`, perhaps on the meta device. Attach adapters first: they freeze what is there.
    """
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    model.head.value = ScalarProjection(model.config.hidden_size, dtype=like.dtype, device=like.device)
    return model


def token_scores(model: nn.Module, batch: Batch, temperature: float = 1.0, shares: Tensor | None = None) -> tuple[Tensor, ...]:
    """One pass over packed rows: the log-probability of each target, and, of a model with a value head, the value of each position.

    Args:
        model: a decoder, or what stands for it on a rank.
        batch: `input_ids` and `targets`, with `documents` and `positions`.
        temperature: that the logits are divided by.
        shares: [rows, seq], what each target weighs in a router's losses (`token_shares`); None for 1.

    Returns:
        [rows, seq] each, in float32 at least; log-probabilities are 0 where there is no target.
    """
    targets = batch["targets"]
    head_fn = partial(both_heads, batch=batch, temperature=temperature)
    return model(batch["input_ids"], head_fn=head_fn, valid=targets != IGNORED if shares is None else shares, **apart(batch))


def both_heads(head: nn.Module, hidden_states: Tensor, batch: Batch, temperature: float) -> tuple[Tensor, ...]:
    """What `token_scores` returns. A decoder's logits are linear in the hidden states, so these are divided: logits may be many more."""
    log_probs = answer_log_probs(head, hidden_states / temperature, batch)
    return (log_probs, head.value(hidden_states)) if hasattr(head, "value") else (log_probs,)
