"""Chapter 03. Training objectives for each kind of batch: masked language modelling, sequence to sequence.

Each objective is chapter 02's model with chapter 02's loss; what differs is the attention mask. In a packed row no token attends
to another document (`Documents`), and positions are those within a document. No objective ever holds all logits. Each passes the
valid tokens on (`valid`), for layers with an auxiliary loss, such as the router of chapter 09.
"""

from functools import partial

from torch import Tensor, nn

from shared.loss import IGNORED
from shared.model.chunked_loss import apart, chunked_loss, trained_rows
from shared.model.masks import Padding
from shared.totals import Batch, Totals


def masked_language_objective(model: nn.Module, batch: Batch) -> Totals:
    """Prediction of hidden tokens from both sides. The head is asked for the targets only, a seventh of the positions.

    Args:
        model: an encoder.
        batch: `input_ids` and `targets` [batch, seq] int64, as `shared.data.masking.Masking` makes them; `documents` and
            `positions` as in `packed_next_token_objective`.
    """
    return model(batch["input_ids"], head_fn=partial(loss_of_targets, batch=batch), valid=batch["targets"] != IGNORED, **apart(batch))


def encoder_decoder_objective(model: nn.Module, batch: Batch) -> Totals:
    """Prediction of each token of the text that is written, from those before it and from the text that is read.

    Args:
        model: an encoder-decoder.
        batch: as `shared.data.spans.pair_batch` makes it: spans with their text, a sentence with its translation.
    """
    read = Padding(batch["valid"])
    return model(
        batch["input_ids"],
        decoder_input_ids=batch["decoder_input_ids"],
        encoder_mask=read,
        cross_mask=read,
        head_fn=partial(chunked_loss, targets=batch["targets"]),
        valid=batch["targets"] != IGNORED,
    )


def loss_of_targets(head: nn.Module, hidden_states: Tensor, batch: Batch) -> Totals:
    """The loss of the positions that have a target. hidden_states: [batch, seq, D]."""
    trained = trained_rows(batch)
    return chunked_loss(head, hidden_states.flatten(0, 1).index_select(0, trained), batch["targets"].flatten()[trained])
