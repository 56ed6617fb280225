"""Chapter 03. Collating sequence-to-sequence pairs for an encoder-decoder: one text is read, the other is written.

The decoder reads its own target one position late, behind a start token, so that position i predicts target i from the
targets before it (teacher forcing). Rows are filled up to the longest of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.loss import IGNORED
from shared.totals import Batch


def pair_batch(pairs: Sequence[tuple[Tensor, Tensor]], start_id: int) -> Batch:
    """A batch of (read, written) pairs.

    Args:
        pairs: one or more of ([n] int64, [m] int64), each with its end token.
        start_id: what the decoder reads first; T5 takes its padding token.

    Returns:
        `input_ids` [batch, N] and `valid` [batch, N] bool, False on padding; `decoder_input_ids` [batch, M], the targets
        one position later, the start token first; `targets` [batch, M], -100 on padding. Ids are int64, padding is 0.

    Raises:
        ValueError: no pairs, or a text without tokens.
    """
    if not pairs or any(len(text) == 0 for pair in pairs for text in pair):
        raise ValueError("A batch of pairs needs at least one pair, and each text at least its end token.")
    read, written = zip(*pairs, strict=True)
    lengths = torch.tensor(list(map(len, read)))
    late = [torch.cat([text.new_tensor([start_id]), text[:-1]]) for text in written]
    input_ids = pad_sequence(read, batch_first=True)
    return {
        "input_ids": input_ids,
        "valid": torch.arange(input_ids.shape[1]) < lengths[:, None],
        "decoder_input_ids": pad_sequence(late, batch_first=True),
        "targets": pad_sequence(written, batch_first=True, padding_value=IGNORED),
    }
