"""Chapter 11. Packed rows of sampled answers: where each answer's tokens stand in a batch, to write columns there and to read results.

A sequence is a prompt and its answer. The position before a token predicts it, so an answer's first position is the prompt's last token.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.data.packing import pack_documents, plan_rows
from shared.data.rows import padding_row, stack_rows
from shared.loss import IGNORED
from shared.preference.sampler import Completion
from shared.totals import Batch


class Sample(NamedTuple):
    """An answer to a prompt.

    prompt: its number in the list of prompts. prompt_ids: the prompt's tokens.
    """

    prompt: int
    prompt_ids: list[int]
    completion: Completion

    @property
    def predictions(self) -> int:
        """Positions that it takes in a row."""
        return len(self.prompt_ids) + len(self.completion.ids) - 1


class AnswerRows:
    """Some answers in packed rows.

    Args:
        samples: one or more.
        seq: positions in a row, at least what the longest of them takes.
        multiple: the number of rows is a multiple of this; rows of padding fill it up.

    Attributes:
        batch: `input_ids`, `targets` (of the answers' tokens alone), `documents` and `positions`, [rows, seq].
        places: [answers, 2] int64, the row and the first position of each answer.
        lengths: [answers] int64, its tokens.
    """

    def __init__(self, samples: Sequence[Sample], seq: int, multiple: int):
        rows, self.places = [], torch.zeros(len(samples), 2, dtype=torch.int64)
        self.lengths = torch.tensor([len(each.completion.ids) for each in samples])
        plan = plan_rows(np.array([each.predictions + 1 for each in samples]), seq)
        for row in range(plan.rows):
            numbers, start = [segment.document for segment in plan.segments(row)], 0
            documents = [[*samples[number].prompt_ids, *samples[number].completion.ids] for number in numbers]
            rows.append(pack_documents([torch.tensor(each) for each in documents], seq))
            for number in numbers:
                self.places[number] = torch.tensor([row, start + len(samples[number].prompt_ids) - 1])
                start += samples[number].predictions
        rows += [padding_row(seq)] * (-len(rows) % multiple)
        self.batch = stack_rows(rows)
        answers = self.put(torch.ones(len(samples), int(self.lengths.max())))
        self.batch["targets"] = self.batch["targets"].where(answers > 0, IGNORED)

    def put(self, column: Tensor) -> Tensor:
        """[answers, time] -> [rows, seq]: what belongs to each token of the answers, and 0 elsewhere."""
        whole = column.new_zeros(self.batch["input_ids"].shape)
        for values, (row, start), length in zip(column, self.places.tolist(), self.lengths.tolist(), strict=True):
            whole[row, start : start + length] = values[:length]
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """[rows, seq] -> [answers, time]: the values at each answer's positions; 0 behind its end."""
        time = int(self.lengths.max())
        padded = F.pad(whole, (0, time))
        taken = torch.stack([padded[row, start : start + time] for row, start in self.places.tolist()])
        return taken.where(torch.arange(time) < self.lengths[:, None], 0)


def minibatch(samples: Sequence[Sample], columns: Mapping[str, Tensor], chosen: Sequence[int], seq: int, multiple: int) -> Batch:
    """Rows of some of the answers, with columns [answers, time] at the positions of their tokens."""
    rows = AnswerRows([samples[number] for number in chosen], seq, multiple)
    return rows.batch | {name: rows.put(column[chosen]) for name, column in columns.items()}
