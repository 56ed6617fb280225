"""Byte-pair encoding on the bytes of a text, with as many merges as one likes. From the ids the text should come back, whatever it is, and
the more merges there are, the fewer ids it takes."""

from collections import Counter

Pair = tuple[int, int]

TEXT = """
to be read aloud:
  the rain in the valley
  the sun on the mountain
  the stone in the river
and then again:
  the river in the rain
  the valley and the sun
"""


def merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    """Each occurrence of a pair, from left to right, as one new id."""
    joined, place = [], 0
    while place < len(ids):
        found = tuple(ids[place : place + 2]) == pair
        joined.append(new if found else ids[place])
        place += 2 if found else 1
    return joined


def most_frequent(ids: list[int]) -> Pair | None:
    """The pair of neighbours that occurs most often, the smaller one of equals; None where no pair is left."""
    counts = Counter(zip(ids, ids[1:]))
    return min(counts, key=lambda pair: (-counts[pair], pair), default=None)


def train(text: str, count: int) -> dict[Pair, int]:
    """Up to `count` merges, in order: pair -> new id, from 256 on."""
    ids, merges = list(text.encode()), {}
    for new in range(256, 256 + count):
        pair = most_frequent(ids)
        if pair is None:
            break
        merges[pair] = new
        ids = merge(ids, pair, new)
    return merges


def encode(text: str, merges: dict[Pair, int]) -> list[int]:
    """The merges replayed in their order."""
    ids = list(text.encode())
    for pair, new in merges.items():
        ids = merge(ids, pair, new)
    return ids


def decode(ids: list[int], merges: dict[Pair, int]) -> bytes:
    """The bytes of ids; a question mark for an id that there is not."""
    tokens = {value: bytes([value]) for value in range(256)}
    for (left, right), new in merges.items():
        tokens[new] = tokens.get(left, b"?") + tokens.get(right, b"?")
    return b"".join(tokens.get(number, b"?") for number in ids)


def main() -> None:
    text = "then the moon in the river on a stone"
    print("merges   ids of the text   largest id   the text comes back as")
    for count in (0, 2, 4, 8, 16, 32):
        merges = train(TEXT, count)
        ids = encode(text, merges)
        print(f"{count:>6}   {len(ids):>15}   {max(ids):>10}   {decode(ids, merges).decode(errors='replace')}")


if __name__ == "__main__":
    main()
