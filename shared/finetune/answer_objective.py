"""Chapter 10. Supervised fine-tuning objective: next-token loss on answers, with logits of the trained tokens alone.

Most tokens of a chat are only read. The head and the loss are a large part of a small model's step, and their rows do not depend on one
another, so rows without a target are left out before the head: the loss and every gradient stay what they were.

How many are left differs from batch to batch. In 16 bits oneDNN compiles a kernel for each number of rows that it has not seen, which costs
as much time as many rows. So under autocast they are padded to a multiple of 64 with rows that have no target.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.loss import IGNORED
from shared.model.chunked_loss import apart, chunked_loss, trained_rows
from shared.totals import Batch, Totals

ROWS = 64  # the number of rows under autocast is a multiple of it


def answer_objective(model: nn.Module, batch: Batch) -> Totals:
    """Next-token prediction of the targets, each document of a packed row as if it were alone.

    Args:
        model: a decoder.
        batch: as for `shared.model.chunked_loss.packed_next_token_objective`; most targets may be -100.
    """
    return model(batch["input_ids"], head_fn=partial(answer_loss, batch=batch), valid=batch["targets"] != IGNORED, **apart(batch))


def answer_loss(head: nn.Module, hidden_states: Tensor, batch: Batch) -> Totals:
    """`chunked_loss` of the rows that have a target. hidden_states: [batch, seq, D]."""
    trained = trained_rows(batch)
    kept = batch["targets"].flatten()[trained]
    if torch.is_autocast_enabled(hidden_states.device.type):
        more = -len(trained) % ROWS
        trained, kept = F.pad(trained, (0, more)), F.pad(kept, (0, more), value=IGNORED)
    return chunked_loss(head, hidden_states.flatten(0, -2).index_select(0, trained), kept)
