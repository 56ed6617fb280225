"""Chapter 03. The data pipeline from scratch: byte-level BPE, its file, best-fit packing, and a loader that resumes on any number of ranks.

Training counts pairs once and then only where something changed: of each pair it keeps how often it occurs and in which words. The loader
keeps one number, the rows that all ranks have taken so far; order, epoch and each rank's part follow from it. (Sennrich et al. 2016,
section 3.2; Radford et al. 2019, section 2.2; packing: Ding et al. 2024, section 3.)
"""

import hashlib
import json
import random
from bisect import bisect_left, insort
from collections import Counter, defaultdict

import regex
import torch

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTABLE + [value for value in range(256) if value not in PRINTABLE]  # by id
BYTE_IDS = {value: number for number, value in enumerate(BYTES)}
WRITTEN = {value: chr(value if value in PRINTABLE else 256 + number - len(PRINTABLE)) for number, value in enumerate(BYTES)}  # in files
READ = {character: value for value, character in WRITTEN.items()}


def words(text):
    return [word.encode() for word in regex.findall(WORDS, text)]


class Tokenizer:
    """tokens: the bytes of each id. merges: pair of ids -> new id, in order. special: text -> id."""

    def __init__(self, tokens, merges, special):
        self.tokens, self.merges, self.special = tokens, merges, special
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.bytes = {token[0]: number for number, token in enumerate(tokens) if len(token) == 1 and number not in special.values()}
        self.known = {}  # words that were encoded before


def encode_word(tokenizer, word):
    """Join the earliest pair that is there, wherever it stands, until none is."""
    ids = [tokenizer.bytes[value] for value in word]
    while pairs := tokenizer.ranks.keys() & set(zip(ids, ids[1:])):
        pair = min(pairs, key=tokenizer.ranks.__getitem__)
        ids = join(ids, pair, tokenizer.merges[pair])
    return ids


def encode(tokenizer, text):
    ids = []
    for word in words(text):
        if word not in tokenizer.known:
            tokenizer.known[word] = encode_word(tokenizer, word)
        ids += tokenizer.known[word]
    return ids


def encode_special(tokenizer, text):
    special = tokenizer.special
    if not special:
        return encode(tokenizer, text)
    longest_first = sorted(special, key=len, reverse=True)  # a regular expression takes the first alternative that fits
    parts = regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)
    return [found for part in parts for found in ([special[part]] if part in special else encode(tokenizer, part))]


def decode(tokenizer, ids):
    ids = list(ids)
    for number in ids:
        if not 0 <= number < len(tokenizer.tokens):  # -1 would be the last token
            raise ValueError(f"There is no token {number}: the vocabulary has ids 0 to {len(tokenizer.tokens) - 1}.")
    return b"".join(tokenizer.tokens[number] for number in ids)


def join(ids, pair, new):
    joined, place = [], 0
    while place < len(ids):
        if ids[place] == pair[0] and place + 1 < len(ids) and ids[place + 1] == pair[1]:
            joined.append(new)
            place += 2
        else:
            joined.append(ids[place])
            place += 1
    return joined


class Pairs:
    """Different words with how often they occur, and of each pair how often it occurs and in which words."""

    def __init__(self, texts):
        found = Counter(word for text in texts for word in words(text))
        self.words, self.times = [[BYTE_IDS[value] for value in word] for word in found], list(found.values())
        self.counts, self.places = Counter(), defaultdict(set)
        for place in range(len(self.words)):
            self.count(place, 1)

    def count(self, place, sign):
        ids, times = self.words[place], sign * self.times[place]
        for pair in zip(ids, ids[1:]):
            self.counts[pair] += times
            self.places[pair].add(place)

    def most_frequent(self):
        best = min(self.counts, key=lambda pair: (-self.counts[pair], pair), default=None)
        return best if best and self.counts[best] > 0 else None

    def join(self, pair, new):
        for place in self.places.pop(pair):
            self.count(place, -1)
            self.words[place] = join(self.words[place], pair, new)
            self.count(place, 1)
        del self.counts[pair]


def train(texts, vocab_size, special=()):
    special = list(special)
    for number, name in enumerate(special):
        if not name or name in special[:number]:
            raise ValueError(f"The special token {name!r} is empty, or given twice.")
    room = vocab_size - len(special)
    if room < len(BYTES):
        raise ValueError(f"vocab_size is {vocab_size}: {len(BYTES)} bytes and {len(special)} special tokens need more.")
    pairs, merges, tokens = Pairs(texts), {}, [bytes([value]) for value in BYTES]
    while len(tokens) < room and (pair := pairs.most_frequent()):
        merges[pair] = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        pairs.join(pair, merges[pair])
    names = {name: len(tokens) + number for number, name in enumerate(special)}
    return Tokenizer(tokens + [name.encode() for name in special], merges, names)


def merges(tokenizer):
    return [(tokenizer.tokens[left], tokenizer.tokens[right]) for left, right in tokenizer.merges]


def vocabulary(tokenizer):
    return list(tokenizer.tokens)


def save(tokenizer, path):
    written = ["".join(WRITTEN[value] for value in token) for token in tokenizer.tokens]
    vocab = {token: number for number, token in enumerate(written) if number not in tokenizer.special.values()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [[written[left], written[right]] for left, right in tokenizer.merges]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": number, "content": name, **flags} for name, number in tokenizer.special.items()]
    parts = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None}
    path.write_text(json.dumps({**parts, "decoder": byte_level, "model": model}, ensure_ascii=False), encoding="utf-8")


def load(path):
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        if file["model"]["type"] != "BPE" or file["pre_tokenizer"]["type"] != "ByteLevel" or file["pre_tokenizer"]["add_prefix_space"]:
            raise ValueError("another kind of tokenizer")
        special = {added["content"]: added["id"] for added in file["added_tokens"]}
        numbers = {token: number for token, number in file["model"]["vocab"].items() if token not in special}
        tokens = {number: bytes(READ[character] for character in token) for token, number in numbers.items()}
        tokens |= {number: name.encode() for name, number in special.items()}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in file["model"]["merges"]]
        joined = {(numbers[left], numbers[right]): numbers[left + right] for left, right in pairs}
        return Tokenizer([tokens[number] for number in range(len(tokens))], joined, special)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no byte-level BPE as tokenizers writes it: {error!r}") from None


def pack(documents, width):
    """Long documents are cut into full pieces and a rest. Then best fit, decreasing: the fullest row with room, found by bisection."""
    if width < 1:
        raise ValueError(f"width is {width}: a row needs at least one position.")
    pieces = []
    for number, ids in enumerate(documents):
        if len(ids) < 2:
            raise ValueError(f"Document {number} has {len(ids)} ids: a prediction needs two.")
        pieces += [ids[first : first + width + 1] for first in range(0, len(ids) - 1, width)]
    rows, rooms = [], []  # rooms: (free positions, number of the row), sorted
    for piece in sorted(pieces, key=len, reverse=True):
        place = bisect_left(rooms, (len(piece) - 1, 0))
        free, number = rooms.pop(place) if place < len(rooms) else (width, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(piece)
        if free := free - len(piece) + 1:  # a full row is not looked at again
            insort(rooms, (free, number))
    return [as_row(row, width) for row in rows]


def as_row(pieces, width):
    row = {name: torch.full((width,), empty) for name, empty in (("input_ids", 0), ("targets", -100), ("documents", -1), ("positions", 0))}
    first = 0
    for number, piece in enumerate(pieces):
        here, ids = slice(first, first + len(piece) - 1), torch.as_tensor(piece, dtype=torch.int64)
        row["input_ids"][here], row["targets"][here] = ids[:-1], ids[1:]
        row["documents"][here], row["positions"][here] = number, torch.arange(len(piece) - 1)
        first = here.stop
    return row


class Loader:
    """done: rows that all ranks have taken. identity: what decides which rows there are."""

    def __init__(self, documents, width, batch_size, seed, rank, ranks):
        if batch_size < 1 or ranks < 1 or batch_size % ranks:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1 and divide by the ranks, which are {ranks}.")
        if not 0 <= rank < ranks:
            raise ValueError(f"There is no rank {rank} among {ranks}.")
        self.batch_size, self.share, self.first = batch_size, batch_size // ranks, rank * batch_size // ranks
        self.rows = pack(documents, width)
        if not self.rows:
            raise ValueError("There are no documents.")
        digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in documents]).encode()).hexdigest()
        self.done, self.identity, self.orders = 0, {"documents": digest, "width": width, "seed": seed}, {}

    def row(self, number):
        """Of the endless sequence of all epochs."""
        epoch, place = divmod(number, len(self.rows))
        if epoch not in self.orders:
            order = list(range(len(self.rows)))
            random.Random(f"{self.identity['seed']}, {epoch}").shuffle(order)
            self.orders = {epoch: order}
        return self.rows[self.orders[epoch][place]]


def start(documents, width, batch_size, seed, rank=0, ranks=1):
    return Loader(documents, width, batch_size, seed, rank, ranks)


def next_batch(loader):
    rows = [loader.row(loader.done + loader.first + number) for number in range(loader.share)]
    loader.done += loader.batch_size
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def state(loader):
    return {"done": loader.done, **loader.identity}


def restore(loader, state):
    for name, value in loader.identity.items():
        if state[name] != value:
            raise ValueError(f"The {name} of the saved loader were {state[name]}, and here {value}: it would give other rows.")
    loader.done = state["done"]


def read_texts(folder):
    texts, refused = {}, {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        data = path.read_bytes()  # read_text would turn \r\n into \n
        try:
            if not data.strip():
                refused[path.name] = "empty"
            elif 0 in data:
                refused[path.name] = f"binary: byte {data.index(0)} is 0"
            else:
                texts[path.name] = data.decode()
        except UnicodeDecodeError as error:
            refused[path.name] = f"not in UTF-8: byte {error.start} is {data[error.start]:#x}"
    return texts, refused
