"""Chapter 03. Token shards on disk: memory-mapped files that are never read into memory as a whole.

A shard is a safetensors file of three arrays: `tokens` (uint16 while the vocabulary allows), `offsets` (where each document
begins) and `byte_counts` (the text that each stands for), and perhaps two more: `trained` (which tokens are predicted in training:
chapter 10's answers) and `values` (a number for each document). Its metadata says which tokenizer made it and what its content adds up to.
So any tool of the format can read a shard, and whatever was changed, cut short or mixed up is refused by name.

Left out on purpose: compression. Mapped memory is read at a random place in microseconds, a compressed file is not.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.course.errors import CourseError
from shared.output_files import write_atomically
from shared.tensor_files import DTYPES, header_of, ordered

FORMAT = "course tokens 1"
ENDING = ".tokens.safetensors"
NUMPY = {code: name for name, code in DTYPES.items() if name != "bfloat16"}


class ShardError(CourseError):
    """A shard that cannot be used; the message says which, why, and what to do."""


def write_shard(
    path: Path,
    documents: Iterable[Sequence[int]],
    byte_counts: Iterable[int],
    tokenizer_identity: str,
    vocab_size: int,
    trained: Iterable[np.ndarray] | None = None,
    values: Iterable[float] | None = None,
) -> None:
    """Write one shard. It appears under its name when it is whole, or not at all.

    Args:
        path: ends in ENDING.
        documents: ids of each document, its end token included.
        byte_counts: bytes of text of each document.
        trained: for each document [tokens] bool, True for tokens that are predicted in training; None where all are.
        values: a number for each document; None for no such numbers.
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    arrays = [fitting(ids, vocab_size).astype(dtype) for ids in documents]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in arrays], dtype=np.int64)])
    counts = np.asarray(list(byte_counts), dtype=np.int64)
    if len(counts) != len(arrays):
        raise ValueError(f"{len(arrays)} documents and {len(counts)} byte counts: give one for each.")
    stored = {
        "tokens": np.concatenate([*arrays, np.empty(0, dtype)]),
        "offsets": offsets,
        "byte_counts": counts,
    }
    if trained is not None:
        stored["trained"] = np.concatenate([*(np.asarray(each, np.uint8) for each in trained), np.empty(0, np.uint8)])
        if len(stored["trained"]) != offsets[-1]:
            raise ValueError(f"{offsets[-1]} tokens, of which {len(stored['trained'])} are marked as trained or not: mark each.")
    if values is not None:
        stored["values"] = np.asarray(list(values), dtype=np.float32)
        if len(stored["values"]) != len(arrays):
            raise ValueError(f"{len(arrays)} documents and {len(stored['values'])} values: give one for each.")
    metadata = {
        "format": FORMAT,
        "tokenizer": tokenizer_identity,
        "vocab_size": str(vocab_size),
        "documents": str(len(arrays)),
        "tokens": str(offsets[-1]),
        "bytes": str(counts.sum()),
    }
    write_atomically(path, serialized(stored, metadata | {"sha256": checksum(stored, metadata)}))


def fitting(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The ids of one document, each within the vocabulary."""
    ids = np.asarray(ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"A shard for {vocab_size} token ids was given ids from {ids.min()} to {ids.max()}.")
    return ids


def serialized(arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """The arrays, each of one dimension, as a safetensors file. The library's own writer puts metadata in another order each time, and
    a file that is made again must be the same bytes."""
    return header_of(arrays, metadata) + b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in ordered(arrays))


def checksum(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """sha256 over the metadata, except for the checksum itself, and over the bytes of all arrays in the order of their names."""
    said = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(memoryview(np.ascontiguousarray(arrays[name])).cast("B"))
    return digest.hexdigest()


class Shard:
    """One shard, mapped into memory.

    Args:
        verify: compare the content with its checksum, which reads all of it once.

    Attributes:
        tokens: [tokens] uint16 or uint32; offsets: [documents + 1] int64; byte_counts: [documents] int64; trained: [tokens] uint8 or None;
            values: [documents] float32 or None.

    Raises:
        ShardError: it is no shard, cut short, or changed.
    """

    def __init__(self, path: Path, verify: bool = True):
        self.path = path
        try:
            self.metadata, arrays = map_arrays(path)
            if self.metadata.get("format") != FORMAT:
                raise ShardError(f"{path} is not a shard of tokens (format {self.metadata.get('format')!r}): prepare the text again.")
            self.tokens, self.offsets, self.byte_counts = (arrays[name] for name in ("tokens", "offsets", "byte_counts"))
            self.trained, self.values = arrays.get("trained"), arrays.get("values")
            counts = len(self.byte_counts), len(self.tokens)
            sound = counts == (int(self.metadata["documents"]), int(self.metadata["tokens"]))
            sound &= len(self.offsets) == counts[0] + 1 and self.offsets[0] == 0 and self.offsets[-1] == counts[1]
            sound &= bool((np.diff(self.offsets) >= 0).all()) and (self.trained is None or len(self.trained) == counts[1])
            sound &= self.values is None or len(self.values) == counts[0]
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ShardError(f"{path} is cut short, or no shard ({error}): delete it and prepare the text again.") from None
        if not sound or (verify and checksum(arrays, self.metadata) != self.metadata.get("sha256")):
            raise ShardError(f"{path} was changed after it was written: delete it and prepare the text again.")


def map_arrays(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """A safetensors file's metadata and its arrays, mapped: eight bytes of header length, a JSON header, then the arrays."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError("the header does not fit into the file")
        header: dict[str, Any] = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(NUMPY[entry["dtype"]])
        if end - begin != dtype.itemsize * entry["shape"][0] or 8 + length + end > size:
            raise ValueError("the arrays do not fit into the file")
        shape = tuple(entry["shape"])
        # An empty array cannot be mapped, and needs not be.
        arrays[name] = np.memmap(path, dtype, "r", 8 + length + begin, shape).view(np.ndarray) if end > begin else np.empty(shape, dtype)
    if 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0) != size:
        raise ValueError("the file is longer than its arrays")
    return metadata, arrays


class TokenStore:
    """All shards of a folder as one list of documents.

    Args:
        folder: where the shards lie; they count in the order of their names.
        tokenizer_identity: of the tokenizer that the tokens are to be read with; None to take any.
        verify: compare every shard with its checksum.

    Attributes:
        lengths: [documents] int64, tokens of each document, its end token included.
        byte_counts: [documents] int64, bytes of text of each.
        vocab_size, tokenizer: the tokenizer's size and identity.
        fingerprint: of the whole content.

    Raises:
        ShardError: no shards, a shard that is damaged, or one that another tokenizer made.
    """

    def __init__(self, folder: Path, tokenizer_identity: str | None = None, verify: bool = True):
        self.folder = Path(folder)
        self.shards = [Shard(path, verify) for path in sorted(self.folder.glob(f"*{ENDING}"))]
        if not self.shards:
            raise ShardError(f"{folder} holds no shards of tokens (*{ENDING}): prepare the text first.")
        wanted = tokenizer_identity or self.shards[0].metadata["tokenizer"]
        for shard in self.shards:
            if shard.metadata["tokenizer"] != wanted:
                made = f"by tokenizer {shard.metadata['tokenizer'][:12]}, not by {wanted[:12]}"
                raise ShardError(f"{shard.path} was made {made}: use the tokenizer that lies beside it, or prepare the text again.")
        self.tokenizer = wanted
        self.vocab_size = int(self.shards[0].metadata["vocab_size"])
        self.lengths = np.concatenate([np.diff(shard.offsets) for shard in self.shards])
        self.byte_counts = np.concatenate([shard.byte_counts for shard in self.shards])
        self.first_of_shard = np.cumsum([0, *(len(shard.byte_counts) for shard in self.shards)]).tolist()
        self.fingerprint = hashlib.sha256("".join(shard.metadata["sha256"] for shard in self.shards).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum())

    def document(self, number: int) -> np.ndarray:
        """[tokens] uint16 or uint32: the ids of a document, its end token last. A view of the file: nothing is copied."""
        shard, here = self.place(number)
        return shard.tokens[here]

    def trained(self, number: int) -> np.ndarray | None:
        """[tokens] bool: which tokens of a document are predicted in training; None where all are."""
        shard, here = self.place(number)
        return None if shard.trained is None else shard.trained[here].astype(bool)

    @property
    def values(self) -> np.ndarray:
        """[documents] float32: the number that is kept with each document; 0 where none is."""
        return np.concatenate([np.zeros(len(s.byte_counts), np.float32) if s.values is None else s.values for s in self.shards])

    def place(self, number: int) -> tuple[Shard, slice]:
        """The shard of a document, and where in its arrays the document lies."""
        if not 0 <= number < len(self):
            raise IndexError(f"There is no document {number}: {self.folder} holds {len(self)}, counted from 0.")
        which = bisect_right(self.first_of_shard, number) - 1
        shard, place = self.shards[which], number - self.first_of_shard[which]
        return shard, slice(shard.offsets[place], shard.offsets[place + 1])
