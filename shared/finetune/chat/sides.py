"""Chapter 10. Split of fine-tuning data into training and held-out examples, by a hash of their prompts, and their shards.

Conversations with the same prompt are on the same side: a model that was trained on one would have memorised the other.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.course.errors import CourseError
from shared.data.prepare import SIDES
from shared.data.shards import ENDING, write_shard
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.encoding import Example

PART = 2**24  # tokens in a shard, which is what is held in memory


class SideWriter:
    """Writes examples to two folders of shards.

    Args:
        folder: gets the folders `training` and `held_out`.
        share: of the prompts, held out.
        sources: names of the data sources, for error messages.
        section: of the configuration that has `held_out_share`.

    Attributes:
        added: examples so far.
    """

    def __init__(self, folder: Path, tokenizer: TextTokenizer, share: float, sources: str, section: str):
        self.folder, self.tokenizer, self.share, self.sources, self.section = folder, tokenizer, share, sources, section
        self.waiting: list[tuple[bytes, Example]] = []
        self.tokens = self.added = self.parts = 0
        self.counts = dict.fromkeys(SIDES, 0)
        for path in folder.glob(f"*/*{ENDING}"):
            path.unlink()  # of a preparation that was interrupted

    def add(self, digest: bytes, example: Example) -> None:
        """digest: of the example's prompt."""
        self.waiting.append((digest, example))
        self.added += 1
        self.tokens += len(example.ids)
        if self.tokens >= PART:
            self.write(self.limit())

    def limit(self) -> bytes:
        """Digests below it are held out."""
        return int(self.share * 2**64).to_bytes(8, "big")

    def finish(self) -> dict[str, int]:
        """Write the remaining examples, and return how many each side has."""
        limit, digests = self.limit(), sorted({digest for digest, _ in self.waiting})
        if not self.parts and len(digests) > 1 and not digests[0] < limit <= digests[-1]:
            # Of few prompts, chance may leave one side empty: the share is counted out, with one prompt at least on each side.
            limit = digests[min(max(1, round(self.share * len(digests))), len(digests) - 1)]
        if not self.parts and len(digests) == 1:
            raise CourseError(f"{self.sources} asks one thing alone, so that nothing can be held out: give records with another prompt.")
        if self.waiting:
            self.write(limit)
        for side, other in (("training", "smaller"), ("held_out", "larger")):
            if not self.counts[side]:
                raise CourseError(
                    f"{self.sources} leaves nothing on the side {side}, since records with one prompt stay together: give more, or a "
                    f"{other} {self.section}.held_out_share than {self.share}."
                )
        return self.counts

    def write(self, limit: bytes) -> None:
        for side, held_out in SIDES.items():
            some = [example for digest, example in self.waiting if (digest < limit) is held_out]
            self.counts[side] += len(some)
            if some:
                self.write_side(self.folder / side / f"{self.parts:05}{ENDING}", some)
        self.waiting, self.tokens, self.parts = [], 0, self.parts + 1

    def write_side(self, path: Path, examples: Sequence[Example]) -> None:
        ids = [example.ids.astype(np.uint32) for example in examples]
        sizes = [example.byte_count for example in examples]
        marks = [example.trained for example in examples]
        values = [example.value for example in examples]
        write_shard(path, ids, sizes, self.tokenizer.identity, self.tokenizer.vocab_size, marks, values if any(values) else None)
