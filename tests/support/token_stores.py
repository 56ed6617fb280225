"""Small stores of tokens whose ids tell which document they are of, and what a loader made of them."""

import random
from itertools import islice

import torch

from shared.data.shards import ENDING, TokenStore, write_shard
from shared.loss import IGNORED

SEQ = 29
VOCAB = 1000
NAMES = {"input_ids", "targets", "documents", "positions"}


def make_store(folder, seed: int, tokenizer: str = "one") -> TokenStore:
    """Documents of 1 to 80 tokens whose ids tell which they are: first the document's number, then a count."""
    lengths = random.Random(seed).choices(range(1, 81), k=60)
    for number in range(3):
        some = [[1 + document, *range(100, 98 + length), 0][:length] for document, length in enumerate(lengths) if document % 3 == number]
        write_shard(folder / f"{number:05}{ENDING}", some, [len(ids) for ids in some], tokenizer, VOCAB)
    return TokenStore(folder)


def rows_of(loader, steps: int | None = None) -> torch.Tensor:
    """[rows, 4 * SEQ]: everything of every row of the next steps, in order."""
    return torch.cat([torch.cat([batch[name] for name in sorted(NAMES)], dim=1) for step in islice(loader, steps) for batch in step])


def together(loaders, steps: int) -> torch.Tensor:
    """The rows of several ranks, in the global order."""
    by_rank = [rows_of(loader, steps) for loader in loaders]
    return torch.cat([torch.cat(step) for step in zip(*(rows.chunk(steps) for rows in by_rank), strict=True)])


def predictions(batches) -> list[tuple[int, int]]:
    return sorted(
        (token, target)
        for batch in batches
        for token, target in zip(batch["input_ids"].flatten().tolist(), batch["targets"].flatten().tolist(), strict=True)
        if target != IGNORED
    )


def expected_predictions(store) -> list[tuple[int, int]]:
    documents = (store.document(number).tolist() for number in range(len(store)))
    return sorted(pair for ids in documents for pair in zip(ids[:-1], ids[1:], strict=True))
