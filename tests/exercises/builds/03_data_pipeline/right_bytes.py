"""Another right build: classes, merges as pairs of bytes, rows found by numpy, batches as slices of stacked rows."""

import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy
import regex
import torch

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FIRST = [*range(33, 127), *range(161, 173), *range(174, 256)]
SINGLE = [bytes([value]) for value in [*FIRST, *(value for value in range(256) if value not in FIRST)]]
AS_TEXT = {token: chr(token[0]) if token[0] in FIRST else chr(256 + place - len(FIRST)) for place, token in enumerate(SINGLE)}
AS_BYTES = {ord(text): token for token, text in AS_TEXT.items()}


def words(text: str) -> list[bytes]:
    return [word.encode() for word in regex.compile(GPT2).findall(text)]


def pairs_in(tokens):
    return Counter(zip(tokens, tokens[1:]))


@dataclass
class Learner:
    """Words as tuples of bytes, and an index from pairs to words."""

    times: Counter
    spelled: dict = field(default_factory=dict)
    count: Counter = field(default_factory=Counter)
    index: dict = field(default_factory=dict)

    def put(self, word, tokens):
        for pair in (old := pairs_in(self.spelled.get(word, ()))):
            self.count[pair] -= old[pair] * self.times[word]
            self.index[pair].discard(word)
            if not self.count[pair]:
                del self.count[pair]
        for pair, number in pairs_in(tokens).items():
            self.count[pair] += number * self.times[word]
            self.index.setdefault(pair, set()).add(word)
        self.spelled[word] = tokens


def joined(tokens, pair):
    waiting, found = list(reversed(tokens)), []
    while waiting:
        token = waiting.pop()
        found.append(token + waiting.pop() if token == pair[0] and waiting and waiting[-1] == pair[1] else token)
    return tuple(found)


class BPE:
    def __init__(self, ids: dict, ranks: dict, special: dict):
        self.ids, self.ranks, self.special, self.seen = ids, ranks, special, {}
        self.by_id = {number: token for token, number in ids.items()} | {number: name.encode() for name, number in special.items()}

    def word(self, word):
        tokens = tuple(word[place : place + 1] for place in range(len(word)))
        while True:
            known = [pair for pair in set(zip(tokens, tokens[1:])) if pair in self.ranks]
            if not known:
                return [self.ids[token] for token in tokens]
            tokens = joined(tokens, min(known, key=self.ranks.get))

    def text(self, text):
        ids = []
        for word in words(text):
            if word not in self.seen:
                self.seen[word] = self.word(word)
            ids += self.seen[word]
        return ids


def train(texts, vocab_size, special=()):
    special = list(special)
    doubtful = [name for name in special if not name or special.count(name) > 1]
    if doubtful:
        raise ValueError(f"These special tokens cannot be: {doubtful}")
    if vocab_size < 256 + len(special):
        raise ValueError(f"{vocab_size} ids are too few")
    learner = Learner(Counter(word for text in texts for word in words(text)))
    for word in learner.times:
        learner.put(word, tuple(word[place : place + 1] for place in range(len(word))))
    ids, ranks = {token: place for place, token in enumerate(SINGLE)}, {}
    while len(ids) + len(special) < vocab_size and learner.count:
        most = max(learner.count.values())
        pair = min((pair for pair, number in learner.count.items() if number == most), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranks[pair] = len(ranks)
        ids[pair[0] + pair[1]] = len(ids)
        for word in list(learner.index[pair]):
            learner.put(word, joined(learner.spelled[word], pair))
    return BPE(ids, ranks, {name: len(ids) + place for place, name in enumerate(special)})


def merges(tokenizer):
    return list(tokenizer.ranks)


def vocabulary(tokenizer):
    return [token for _, token in sorted(tokenizer.by_id.items())]


def encode(tokenizer, text):
    return tokenizer.text(text)


def encode_special(tokenizer, text):
    if not tokenizer.special:
        return tokenizer.text(text)
    names, ids, end = re.compile("|".join(re.escape(name) for name in sorted(tokenizer.special, key=len)[::-1])), [], 0
    for match in names.finditer(text):
        ids += [*tokenizer.text(text[end : match.start()]), tokenizer.special[match.group()]]
        end = match.end()
    return ids + tokenizer.text(text[end:])


def decode(tokenizer, ids):
    try:
        return b"".join([tokenizer.by_id[int(number)] for number in ids])
    except KeyError as missing:
        raise ValueError(f"There is no id {missing}") from None


def save(tokenizer, path):
    def text(token):
        return "".join(AS_TEXT[token[place : place + 1]] for place in range(len(token)))

    added = [
        dict(id=number, content=name, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for name, number in tokenizer.special.items()
    ]
    vocab = {text(token): number for token, number in tokenizer.ids.items()} | tokenizer.special
    model = dict(type="BPE", dropout=None, unk_token=None, vocab=vocab, merges=[list(map(text, pair)) for pair in tokenizer.ranks])
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=True)
    path.write_bytes(json.dumps(dict(added_tokens=added, pre_tokenizer=level, decoder=level, model=model)).encode())


def load(path):
    def token(text):
        return b"".join(AS_BYTES[ord(letter)] for letter in text)

    try:
        file = json.loads(path.read_text("utf-8"))
        if (file["pre_tokenizer"]["type"], file["model"]["type"]) != ("ByteLevel", "BPE"):
            raise ValueError("no byte-level BPE")
        special = {each["content"]: each["id"] for each in file["added_tokens"]}
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in file["model"]["merges"]]
        ids = {token(text): number for text, number in file["model"]["vocab"].items() if text not in special}
        return BPE(ids, {(token(left), token(right)): rank for rank, (left, right) in enumerate(pairs)}, special)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def cut(ids, width):
    return [ids[start : start + width + 1] for start in range(0, len(ids) - 1, width)]


def pack(documents, width):
    if width <= 0:
        raise ValueError(f"width must be at least 1, not {width}")
    short = [number for number, ids in enumerate(documents) if len(ids) < 2]
    if short:
        raise ValueError(f"document {short[0]} predicts nothing")
    pieces = sorted((piece for ids in documents for piece in cut(list(map(int, ids)), width)), key=lambda piece: -len(piece))
    rooms, rows = numpy.zeros(len(pieces), dtype=int), []
    for piece in pieces:
        size = len(piece) - 1
        there = rooms[: len(rows)]
        fits = numpy.flatnonzero(there >= size)
        if len(fits) == 0:
            rooms[len(rows)] = width - size
            rows.append([piece])
        else:
            number = fits[there[fits].argmin()]
            rows[number].append(piece)
            rooms[number] -= size
    flat = torch.zeros(len(rows), 4, width, dtype=torch.long)
    flat[:, 1], flat[:, 2] = -100, -1
    for row, pieces in zip(flat, rows):
        values = [
            [number for piece in pieces for number in piece[:-1]],
            [number for piece in pieces for number in piece[1:]],
            [place for place, piece in enumerate(pieces) for _ in piece[1:]],
            [place for piece in pieces for place in range(len(piece) - 1)],
        ]
        row[:, : len(values[0])] = torch.tensor(values)
    return [dict(zip(("input_ids", "targets", "documents", "positions"), row.unbind())) for row in flat]


class Stream:
    def __init__(self, documents, width, batch_size, seed, rank, ranks):
        for name, wrong in (
            ("documents", not len(documents)), ("width", width < 1), ("batch_size", batch_size < 1), ("ranks", ranks < 1),
            ("rank", not 0 <= rank < ranks), ("batch_size", batch_size % max(1, ranks)),
        ):  # fmt: skip
            if wrong:
                raise ValueError(f"{name}: width {width}, batch_size {batch_size}, rank {rank}, ranks {ranks}")
        rows = pack(documents, width)
        self.rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self.count, self.size, self.seed, self.mine = len(rows), batch_size, seed, slice(rank, None, ranks)
        self.facts = [zlib.crc32(str([[int(number) for number in ids] for ids in documents]).encode()), width, seed]
        self.at = 0

    def next(self):
        numbers = torch.arange(self.at, self.at + self.size)
        orders = {
            epoch: torch.randperm(self.count, generator=torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**62))
            for epoch in set((numbers // self.count).tolist())
        }
        places = torch.stack([orders[number // self.count][number % self.count] for number in numbers.tolist()])[self.mine]
        self.at += self.size
        return {name: tensor[places] for name, tensor in self.rows.items()}


def start(documents, width, batch_size, seed, rank=0, ranks=1):
    return Stream(documents, width, batch_size, seed, rank, ranks)


def next_batch(loader):
    return loader.next()


def state(loader):
    return {"rows seen": loader.at, "facts": list(loader.facts)}


def restore(loader, state):
    for name, was, now in zip(("documents", "width", "seed"), state["facts"], loader.facts):
        if was != now:
            raise ValueError(f"The {name} are others.")
    loader.at = state["rows seen"]


def read_texts(folder):
    texts, refused = {}, {}
    for path in sorted((path for path in folder.glob("*") if not path.is_dir()), key=lambda path: path.name):
        data = path.read_bytes()
        reason = "empty" if not data.strip() else "binary" if b"\x00" in data else ""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = reason or f"UTF-8: byte {error.start}"
        if reason:
            refused[path.name] = reason
        else:
            texts[path.name] = text
    return texts, refused
