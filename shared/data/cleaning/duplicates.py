"""Chapter 03. Deduplication: exact duplicates by hash, near duplicates by MinHash and locality-sensitive hashing.

Exact: a hash of the text. Near: the share of common runs of five words, |A & B| / |A | B|, estimated without comparing texts. Under
a random hash function the smallest hash over A and over B is the same one with just that probability (Broder 1997), so two
signatures of 112 such minima agree in about that share of places. Signatures are cut into 14 bands of 8; only documents that share a
whole band are compared (Leskovec et al. 2020, section 3.4; the numbers are those of Penedo et al. 2024, FineWeb).

Left out on purpose: lines that repeat across documents, and an index on disk. Here 2.2 KB are held for each kept document.
"""

import hashlib
from array import array
from functools import cache
from typing import ClassVar

import numpy as np

from shared.data.cleaning.stages import Measured, Verdict

BANDS, ROWS = 14, 8
WORDS = 5  # in a run
BLOCK = 4096  # runs hashed at a time
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64


def text_digest(text: str) -> bytes:
    """16 bytes by which a text is known, whatever white space is at its ends.

    >>> text_digest(" a text\\n") == text_digest("a text")
    True
    """
    return hashlib.sha256(text.strip().encode()).digest()[:16]


class ExactDuplicates:
    """Drop a text that has been seen before, byte for byte except for white space at its ends."""

    name = "exact duplicates"
    remembers: ClassVar[bool] = True

    def __init__(self):
        self.seen: set[bytes] = set()

    def measure(self, text: str) -> Measured:
        return Measured(text, np.frombuffer(text_digest(text), np.uint8))

    def decide(self, value: np.ndarray) -> Verdict:
        if value.tobytes() in self.seen:
            return Verdict("the same text again", 1.0)
        self.remember(value)
        return Verdict()

    def remember(self, value: np.ndarray) -> None:
        self.seen.add(value.tobytes())


class NearDuplicates:
    """Drop a text whose runs of five words are those of an earlier kept one, to a share of at least `similarity`, as estimated.

    Texts of fewer than five words are compared by all their words together, and those without a word with none.
    """

    name = "near duplicates"
    remembers: ClassVar[bool] = True

    def __init__(self, similarity: float):
        self.similarity = self.threshold = similarity
        self.signatures: list[np.ndarray] = []
        self.newest: list[dict[int, int]] = [{} for _ in range(BANDS)]  # a band's hash -> the last document that has it
        self.before = [array("q") for _ in range(BANDS)]  # document -> the one before it with the same hash, or -1

    def measure(self, text: str) -> Measured:
        return Measured(text, signature(text.encode()))

    def decide(self, value: np.ndarray) -> Verdict:
        if not len(value):  # no word
            return Verdict()
        best = max((float((self.signatures[number] == value).mean()) for number in self.candidates(value)), default=0.0)
        if best >= self.similarity:
            return Verdict("nearly the same text again", best)
        self.remember(value)
        return Verdict(score=best)

    def remember(self, value: np.ndarray) -> None:
        if not len(value):
            return
        number = len(self.signatures)
        for newest, before, key in zip(self.newest, self.before, band_keys(value), strict=True):
            before.append(newest.get(key, -1))
            newest[key] = number
        self.signatures.append(value)

    def candidates(self, value: np.ndarray) -> set[int]:
        """The kept documents that share a band with a signature."""
        found = set()
        for newest, before, key in zip(self.newest, self.before, band_keys(value), strict=True):
            number = newest.get(key, -1)
            while number >= 0:
                found.add(number)
                number = before[number]
        return found


def band_keys(signature_: np.ndarray) -> list[int]:
    """One hash for each band of a signature."""
    weights = powers(ROWS)
    return (signature_.reshape(BANDS, ROWS).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64).tolist()


def signature(content: bytes) -> np.ndarray:
    """[BANDS * ROWS] uint32: the smallest hash of the text's runs of words under each of as many hash functions; [0] without words."""
    runs = run_hashes(content)
    if not len(runs):
        return np.empty(0, np.uint32)
    multipliers, offsets = hash_functions()
    smallest = np.full(BANDS * ROWS, np.iinfo(np.uint32).max, dtype=np.uint32)
    for first in range(0, len(runs), BLOCK):
        # Multiply, add, keep the upper half: a 2-universal hash (Dietzfelbinger 1996).
        hashed = (multipliers[:, None] * runs[first : first + BLOCK] + offsets[:, None]) >> np.uint64(32)
        np.minimum(smallest, hashed.min(axis=1).astype(np.uint32), out=smallest)
    return smallest


def run_hashes(content: bytes) -> np.ndarray:
    """[runs] uint64: a hash of each distinct run of WORDS words, in lower case. A word is letters, digits, _ and all that is not ASCII."""
    folded, is_word = byte_tables()
    raw = np.frombuffer(content, np.uint8)
    inside = np.concatenate([[False], is_word[raw], [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return np.empty(0, np.uint64)
    # prefix[i] = sum of byte j times MULTIPLIER ** j over j < i, so a word's hash is a difference, shifted to the word's beginning.
    prefix = np.concatenate([np.zeros(1, np.uint64), np.cumsum(folded[raw] * powers(len(raw)), dtype=np.uint64)])
    words = mixed((prefix[stops] - prefix[starts]) * inverse_powers(len(raw))[starts])
    size = min(WORDS, len(words))
    weights = powers(size)
    runs = sum(words[i : len(words) - size + 1 + i] * weights[i] for i in range(size))
    return np.unique(mixed(runs))


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Spread every bit over all others (the finalizer of splitmix64; Steele et al. 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


@cache
def byte_tables() -> tuple[np.ndarray, np.ndarray]:
    """[256] uint64, each byte in lower case, from 1; and [256] bool, whether it belongs to a word."""
    every = bytes(range(256))
    is_word = np.array([byte >= 128 or chr(byte).isalnum() or byte == ord("_") for byte in every])
    return np.frombuffer(every.lower(), np.uint8).astype(np.uint64) + np.uint64(1), is_word


@cache
def hash_functions() -> tuple[np.ndarray, np.ndarray]:
    """[BANDS * ROWS] uint64 each: odd multipliers and offsets, drawn once and for all."""
    generator = np.random.Generator(np.random.PCG64(5))
    drawn = generator.integers(0, 2**64, (2, BANDS * ROWS), dtype=np.uint64)
    return drawn[0] | np.uint64(1), drawn[1]


def powers(count: int) -> np.ndarray:
    """[count] uint64: MULTIPLIER ** i modulo 2**64."""
    return power_table(MULTIPLIER, max(16, (count - 1).bit_length()))[:count]


def inverse_powers(count: int) -> np.ndarray:
    """[count] uint64: what undoes `powers`."""
    return power_table(pow(MULTIPLIER, -1, 2**64), max(16, (count - 1).bit_length()))[:count]


@cache
def power_table(base: int, bits: int) -> np.ndarray:
    """[2**bits] uint64: base ** i modulo 2**64. Sizes are powers of two, so that few tables are kept."""
    factors = np.full(2**bits, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
