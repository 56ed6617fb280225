"""Chapter 10. Dataloaders for supervised fine-tuning: packed conversations with masked targets, and padded pairs for encoder-decoders.

The rows are chapter 03's: shuffled, packed with document masks, resumable on any number of ranks. The shards say which tokens are trained,
so the targets of the others are -100.
"""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F

from shared.course.errors import CourseError
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.packing import RowPlan
from shared.data.rows import PackedRows, Row, RowIndex, as_ids
from shared.data.shards import TokenStore
from shared.data.spans import pair_batch
from shared.finetune.chat.prepare import PreparedChats
from shared.loss import IGNORED
from shared.totals import Batch


class PrefixedDocuments:
    """A store whose documents all begin with the same ids, which are not trained: virtual tokens. It serves as the store of rows."""

    def __init__(self, store: TokenStore, ids: Sequence[int]):
        self.store, self.ids, self.folder, self.tokenizer = store, np.array(ids, dtype=np.int64), store.folder, store.tokenizer
        self.lengths = store.lengths + len(ids)
        self.fingerprint = f"{store.fingerprint}+{list(ids)}"

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        return np.concatenate([self.ids, self.store.document(number)])

    def trained(self, number: int) -> np.ndarray:
        return np.concatenate([np.zeros(len(self.ids), dtype=bool), self.store.trained(number)])


class PairRows(PackedRows):
    """Rows of one pair each: `pair_batch` of it, filled up to `seq` tokens that are read and as many that are written.

    Args:
        start_id: what the decoder reads first; T5 takes its padding token.
    """

    def __init__(self, store: TokenStore, seq: int, seed: int, epochs: int | None, start_id: int):
        super().__init__(store, seq, seed, epochs)
        self.start_id = start_id

    def planned(self, lengths: np.ndarray) -> RowPlan:
        return one_in_a_row(lengths, self.seq)

    def row(self, index: RowIndex) -> Row:
        plan, documents, order = self.plan(index.epoch)
        return Row(pair_row(self.store, int(documents[plan.document[order[index.row]]]), self.seq, self.start_id), 0)

    def padding(self) -> Batch:
        return nothing_to_write(self.seq, self.start_id)


class PairEvaluationLoader(EvaluationLoader):
    """Every pair of a store once, as `PairRows` makes them."""

    def __init__(self, store: TokenStore, *, start_id: int, **sizes: int | None):
        super().__init__(store, **sizes)
        self.start_id = start_id

    def planned(self, lengths: np.ndarray) -> RowPlan:
        return one_in_a_row(lengths, self.seq)

    def row(self, number: int | None) -> Batch:
        if number is None:
            return nothing_to_write(self.seq, self.start_id)
        return pair_row(self.store, int(self.plan.document[number]), self.seq, self.start_id)


def one_in_a_row(lengths: np.ndarray, seq: int) -> RowPlan:
    """A row for each document, as it is."""
    numbers = np.arange(len(lengths), dtype=np.int64)
    return RowPlan(seq, np.arange(len(lengths) + 1), numbers, np.zeros_like(numbers), np.asarray(lengths, dtype=np.int64))


def pair_row(store: TokenStore, document: int, seq: int, start_id: int) -> Batch:
    """A pair as a row: [seq] each. The trained tokens of a document are those that are written."""
    ids, first = as_ids(store.document(document)), int(store.trained(document).argmax())
    batch = pair_batch([(ids[:first], ids[first:])], start_id)
    fills = {"targets": IGNORED}
    return {name: F.pad(value[0], (0, seq - value.shape[1]), value=fills.get(name, 0)) for name, value in batch.items()}


def nothing_to_write(seq: int, start_id: int) -> Batch:
    """A row of padding: one token is read, since attention to none has no value, and nothing is written."""
    row = {name: F.pad(value[0], (0, seq - 1)) for name, value in pair_batch([(as_ids(np.zeros(1)),) * 2], start_id).items()}
    return row | {"targets": row["targets"].fill_(IGNORED)}


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
    """This rank's rows to train on, and those that are held out.

    Args:
        seq: tokens that a row predicts, at least as many as the conversations were prepared for, and the virtual tokens.
        held_out_rows: in an evaluation; None for all.
        virtual_ids: come before each conversation (`shared.finetune.soft_prompts`).
        start_id: for pairs: what the decoder reads first.

    For the others see `PackedLoader`.
    """
    stores = [PrefixedDocuments(store, virtual_ids) if len(virtual_ids) else store for store in (chats.training, chats.held_out)]
    pairs = chats.template is None
    longest = max(longest_read(store) if pairs else int(store.lengths.max()) - 1 for store in stores)
    if longest > seq:
        before = f" behind {len(virtual_ids)} virtual tokens" if len(virtual_ids) else ""
        raise CourseError(
            f"{chats.folder} holds conversations of {longest:,} tokens{before}, and a row takes {seq:,}: prepare them for shorter rows."
        )
    if pairs and start_id is None:
        raise CourseError("Pairs of texts are for an encoder-decoder: give a model of that kind, or another template than pairs.")
    rows = PairRows(stores[0], seq, seed, epochs, start_id) if pairs else PackedRows(stores[0], seq, seed, epochs)
    training = StatefulLoader(rows, batch_size=batch_size, micro_batch_size=micro_batch_size, rank=rank, ranks=ranks)
    sizes = {"seq": seq, "batch_size": micro_batch_size, "limit": held_out_rows, "rank": rank, "ranks": ranks}
    held_out = PairEvaluationLoader(stores[1], start_id=start_id, **sizes) if pairs else EvaluationLoader(stores[1], **sizes)
    return training, held_out


def longest_read(store: TokenStore | PrefixedDocuments) -> int:
    """The longest text of a store of pairs, of those that are read and those that are written."""
    marks = (store.trained(number) for number in range(len(store)))
    return max(max(int(mark.sum()), int((~mark).sum())) for mark in marks)
