"""Chapter 11. Dataloaders of preference pairs: packed rows in which a chosen and a rejected answer always stand together.

The rows are chapter 03's: shuffled, packed by best fit with document masks, resumable on any number of ranks. What is planned are pairs, so
none is spread over two rows. Each answer stands with its prompt, and sees nothing of the other.

    row       prompt chosen | prompt rejected | prompt chosen | prompt rejected | padding
    document       0        |        1        |      2        |        3        |   -1
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from shared.course.errors import CourseError
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.packing import Segment, pack_documents
from shared.data.rows import Documents, PackedRows, as_ids, masked, padding_row
from shared.data.shards import TokenStore
from shared.preference.prepare import PreparedPairs
from shared.preference.reference import ReferencedDocuments
from shared.totals import Batch


class ComparedDocuments(Documents):
    """Pairs, or single answers, of a store: the units that rows are packed from.

    Args:
        store: of a preparation; a pair is two documents in it. Of `ReferencedDocuments`, rows have the reference as well.
        facts: [documents], the margin of a document's pair, or 1 for a good single answer and 0 for a bad one.
        together: documents that stand together: 2 for pairs, 1 for single answers.
        seq: positions in a row.
        whole: the last token of each document is an input as well, without a target: a reward model reads its reward there.
        virtual_ids: come before each document.
    """

    def __init__(
        self,
        store: TokenStore | ReferencedDocuments,
        facts: np.ndarray,
        together: int,
        seq: int,
        whole: bool = False,
        virtual_ids: Sequence[int] = (),
    ):
        super().__init__(store, virtual_ids)
        self.facts, self.together, self.seq, self.whole = facts, together, seq, whole
        positions = (self.lengths - 1 + whole).reshape(-1, together).sum(1)
        self.lengths = positions + 1  # so that rows are planned of that many positions
        self.fingerprint = f"{self.fingerprint}/{together}/{whole}"
        if positions.max() > seq:
            what = ("pairs" if together == 2 else "answers") + (f" behind {len(virtual_ids)} virtual tokens" if len(virtual_ids) else "")
            raise CourseError(
                f"{self.folder} holds {what} of {positions.max():,} tokens, and a row takes {seq:,}: prepare them for shorter rows."
            )

    def trained(self, number: int) -> np.ndarray:
        """[tokens] bool of a document, with room for a target behind its last token if that is an input."""
        trained = super().trained(number)
        return np.append(trained, False) if self.whole else trained

    def row(self, segments: Sequence[Segment], seq: int) -> Batch:
        """A row of these pairs or single answers: [seq] each. `preference_loaders` describes it."""
        numbers = [number for one, *_ in segments for number in range(one * self.together, (one + 1) * self.together)]
        row, counted = padding_row(seq), [self.trained(number)[1:] for number in numbers]
        if numbers:
            ids = [as_ids(self.document(number)) for number in numbers]
            row = pack_documents([F.pad(each, (0, 1)) for each in ids] if self.whole else ids, seq)
            row = masked(row, counted)
        row["numbers"] = self.slots(torch.tensor(numbers, dtype=torch.int64), -1)
        facts = torch.from_numpy(self.facts[numbers])
        row |= {"margins": self.slots(facts[::2], 0)} if self.together == 2 else {"desirable": self.slots(facts.long(), -1)}
        if isinstance(self.store, ReferencedDocuments):
            row["reference"] = self.reference(numbers, counted)
        return row

    def slots(self, facts: torch.Tensor, fill: int) -> torch.Tensor:
        """A value of each sequence, or of each pair, in the first columns of a row."""
        return F.pad(facts, (0, self.seq - len(facts)), value=fill)

    def reference(self, numbers: Sequence[int], counted: Sequence[np.ndarray]) -> torch.Tensor:
        """[seq] float32: the reference's log-probability of each target, 0 where there is none."""
        found, place, before = np.zeros(self.seq, np.float32), 0, len(self.before)
        for number, trained in zip(numbers, counted, strict=True):
            known = self.store.reference(number)[1:]
            here = slice(place + before, place + before + len(known))
            found[here] = np.where(trained[before : before + len(known)], known, 0)
            place += len(trained)
        return torch.from_numpy(found)


def compared_documents(
    prepared: PreparedPairs,
    held_out: bool,
    seq: int,
    whole: bool = False,
    answers: bool = False,
    virtual_ids: Sequence[int] = (),
) -> ComparedDocuments:
    """One side of a preparation as pairs, or as single answers. Arguments as for `preference_loaders`."""
    store, paired = prepared.held_out if held_out else prepared.training, prepared.report.paired
    if not paired and not answers:
        raise CourseError(f"{prepared.folder} holds single answers, and pairs are compared here: give pairs, or the loss kto.")
    facts = 1 - np.arange(len(store), dtype=np.float32) % 2 if paired and answers else store.values
    return ComparedDocuments(store, facts, 1 if answers else 2, seq, whole, virtual_ids)


def preference_loaders(
    prepared: PreparedPairs,
    *,
    seq: int,
    batch_size: int,
    micro_batch_size: int,
    seed: int,
    epochs: int | None = None,
    held_out_rows: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    whole: bool = False,
    answers: bool = False,
    virtual_ids: Sequence[int] = (),
) -> tuple[StatefulLoader, EvaluationLoader]:
    """Loaders of this rank's training rows and held-out rows.

    A batch holds [rows, seq] tensors: what `pack_documents` makes; `numbers`, in column n the document in the store of a row's sequence n,
    -1 where there is none; of pairs `margins`, in column p that of pair p; of single answers `desirable`, in column n 1 or 0, or -1 where
    there is none; and `reference`, the log-probability of each target, where the stores know it (`ComparedDocuments`).

    Args:
        seq: positions in a row, at least as many as the preferences were prepared for, and the virtual tokens.
        held_out_rows: in an evaluation; None for all.
        whole: the last token of each answer is an input as well.
        answers: rows of single answers; pairs are taken apart into a good and a bad one.
        virtual_ids: come before each answer's prompt (`shared.finetune.soft_prompts`).

    For the others see `PackedLoader`.
    """
    training, held_out = (compared_documents(prepared, held_out, seq, whole, answers, virtual_ids) for held_out in (False, True))
    sizes = {"rank": rank, "ranks": ranks}
    rows = StatefulLoader(PackedRows(training, seq, seed, epochs), batch_size=batch_size, micro_batch_size=micro_batch_size, **sizes)
    return rows, EvaluationLoader(held_out, seq=seq, batch_size=micro_batch_size, limit=held_out_rows, **sizes)
