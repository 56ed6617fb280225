"""Chapter 10. Dataloaders for supervised fine-tuning: packed conversations with masked targets, and padded pairs for encoder-decoders.

The rows are chapter 03's: shuffled, packed with document masks, resumable on any number of ranks. The shards say which tokens are trained,
so the targets of the others are -100.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.nn.functional as F

from shared.course.errors import CourseError
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.packing import RowPlan, Segment
from shared.data.rows import Documents, PackedRows, as_ids
from shared.data.shards import TokenStore
from shared.data.spans import pair_batch
from shared.finetune.chat.prepare import PreparedChats
from shared.loss import IGNORED
from shared.totals import Batch


class PairDocuments(Documents):
    """Pairs of texts, one in a row: filled up to `seq` tokens that are read and as many that are written.

    Args:
        start_id: what the decoder reads first; T5 takes its padding token.
    """

    def __init__(self, store: TokenStore, before: Sequence[int], start_id: int):
        super().__init__(store, before)
        self.start_id = start_id

    def plan(self, lengths: np.ndarray, seq: int, strategy: str = "best_fit", slack: int = 0) -> RowPlan:
        numbers = np.arange(len(lengths), dtype=np.int64)
        return RowPlan(seq, np.arange(len(lengths) + 1), numbers, np.zeros_like(numbers), np.asarray(lengths, dtype=np.int64))

    def row(self, segments: Sequence[Segment], seq: int) -> Batch:
        """A pair, of which the trained tokens are those that are written. A row of padding reads one token, since attention to none has no
        value, and writes nothing."""
        ids, first = as_ids(np.zeros(2)), 1
        for number, *_ in segments:
            ids, first = as_ids(self.document(number)), int(self.trained(number).argmax())
        batch, fills = pair_batch([(ids[:first], ids[first:])], self.start_id), {"targets": IGNORED}
        if not segments:
            batch["targets"].fill_(IGNORED)
        return {name: F.pad(value[0], (0, seq - value.shape[1]), value=fills.get(name, 0)) for name, value in batch.items()}


def chat_loaders(
    chats: PreparedChats,
    *,
    seq: int,
    batch_size: int,
    micro_batch_size: int,
    seed: int,
    epochs: int | None = None,
    held_out_rows: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    virtual_ids: Sequence[int] = (),
    start_id: int | None = None,
) -> tuple[StatefulLoader, EvaluationLoader]:
    """Loaders of this rank's training rows and held-out rows.

    Args:
        seq: tokens that a row predicts, at least as many as the conversations were prepared for, and the virtual tokens.
        held_out_rows: in an evaluation; None for all.
        virtual_ids: come before each conversation (`shared.finetune.soft_prompts`).
        start_id: for pairs: what the decoder reads first.

    For the others see `PackedLoader`.
    """
    pairs = chats.template is None
    longest = len(virtual_ids) + max(
        longest_read(store) if pairs else int(store.lengths.max()) - 1 for store in (chats.training, chats.held_out)
    )
    if longest > seq:
        before = f" behind {len(virtual_ids)} virtual tokens" if len(virtual_ids) else ""
        raise CourseError(
            f"{chats.folder} holds conversations of {longest:,} tokens{before}, and a row takes {seq:,}: prepare them for shorter rows."
        )
    if pairs and start_id is None:
        raise CourseError("Pairs of texts are for an encoder-decoder: give a model of that kind, or another template than pairs.")
    made = partial(PairDocuments, start_id=start_id) if pairs else Documents
    training, held_out = (made(store, virtual_ids) for store in (chats.training, chats.held_out))
    rows, share = PackedRows(training, seq, seed, epochs), {"rank": rank, "ranks": ranks}
    loader = StatefulLoader(rows, batch_size=batch_size, micro_batch_size=micro_batch_size, **share)
    return loader, EvaluationLoader(held_out, seq=seq, batch_size=micro_batch_size, limit=held_out_rows, **share)


def longest_read(store: TokenStore) -> int:
    """The longest text of a store of pairs, of those that are read and those that are written."""
    marks = (store.trained(number) for number in range(len(store)))
    return max(max(int(mark.sum()), int((~mark).sum())) for mark in marks)
