"""Packed rows of random pairs, unevenly many in a row, for the tests of preference objectives."""

import torch
from torch import Tensor

from shared.data.packing import pack_documents
from shared.data.rows import padding_row
from shared.totals import Batch


def random_documents(generator: torch.Generator, count: int, vocab: int, longest: int = 6) -> list[tuple[Tensor, int]]:
    """(ids, tokens of the prompt): two and two have one prompt, and different answers; of equal ones, rounding would choose the better."""
    made = []
    for number in range(count):
        if number % 2 == 0:
            prompt = torch.randint(vocab, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator)
        answer = torch.randint(vocab, (int(torch.randint(1, longest - 2, (), generator=generator)),), generator=generator)
        if number % 2 and torch.equal(torch.cat([prompt, answer]), made[-1][0]):
            answer = (answer + 1) % vocab
        made.append((torch.cat([prompt, answer]), len(prompt)))
    return made


def packed_row(documents: list[tuple[Tensor, int]], seq: int) -> Batch:
    """A row [seq] of these documents, whose prompts are not trained."""
    if not documents:
        return padding_row(seq)
    row, place = pack_documents([ids for ids, _ in documents], seq), 0
    for ids, prompt in documents:
        row["targets"][place : place + prompt - 1] = -100
        place += len(ids) - 1
    return row


def pair_batch(seed: int, pairs: list[int], seq: int, vocab: int, dtype: torch.dtype = torch.float64) -> Batch:
    """A batch with so many pairs in each row, of which some may be empty; with `reference`, `desirable` and `baseline`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [packed_row(random_documents(generator, 2 * count, vocab), seq) for count in pairs]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    shape = batch["targets"].shape
    batch["reference"] = -3 * torch.rand(shape, generator=generator, dtype=dtype).where(batch["targets"] >= 0, 0)
    batch["desirable"] = (torch.rand(shape, generator=generator) < 0.5).long()
    batch["baseline"] = torch.full(shape, 0.3, dtype=dtype)
    return batch
