"""Another right build: plain functions and dictionaries, merges from a heap, rows by room, documents packed anew in each epoch."""

import hashlib
import heapq
import itertools
import json
import os
from collections import defaultdict

import numpy as np
import regex
import torch

PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ORDER = VISIBLE + sorted(set(range(256)) - set(VISIBLE))
PLACE = {value: place for place, value in enumerate(ORDER)}
LETTER = {value: chr(value) if value in VISIBLE else chr(256 + place - 188) for place, value in enumerate(ORDER)}
VALUE = {letter: value for value, letter in LETTER.items()}


def words(text):
    return [match.group().encode("utf-8") for match in PATTERN.finditer(text)]


def merged(ids, left, right, new):
    """The new word, and what changes in the counts of pairs."""
    found, place = [], 0
    while place < len(ids):
        if place + 1 < len(ids) and ids[place] == left and ids[place + 1] == right:
            found.append(new)
            place += 2
        else:
            found.append(ids[place])
            place += 1
    changes = defaultdict(int)
    for pair in itertools.pairwise(ids):
        changes[pair] -= 1
    for pair in itertools.pairwise(found):
        changes[pair] += 1
    return found, changes


def learn(texts, count):
    times = {}
    for text in texts:
        for word in words(text):
            times[word] = times.get(word, 0) + 1
    spelled, weights = [[PLACE[value] for value in word] for word in times], list(times.values())
    counts, where = defaultdict(int), defaultdict(set)
    for number, (ids, weight) in enumerate(zip(spelled, weights)):
        for pair in itertools.pairwise(ids):
            counts[pair] += weight
            where[pair].add(number)
    heap = [(-number, pair) for pair, number in counts.items()]
    heapq.heapify(heap)
    pairs = []
    while heap and len(pairs) < count:
        number, pair = heapq.heappop(heap)
        if counts[pair] != -number or not number:  # an old entry: the newer one is in the heap, too
            continue
        new, touched = 256 + len(pairs), set()
        pairs.append(pair)
        for place in where.pop(pair):
            spelled[place], changes = merged(spelled[place], *pair, new)
            for other, change in changes.items():
                if change:
                    counts[other] += change * weights[place]
                    touched.add(other)
                if change > 0:
                    where[other].add(place)
        for other in touched - {pair}:
            heapq.heappush(heap, (-counts[other], other))
    return pairs


def train(texts, vocab_size, special=()):
    for number, name in enumerate(special):
        if name == "" or name in list(special)[:number]:
            raise ValueError(f"special token {name!r}")
    count = vocab_size - 256 - len(special)
    if count < 0:
        raise ValueError(f"vocab_size {vocab_size} is too small")
    tokens, ranks = [bytes([value]) for value in ORDER], {}
    for left, right in learn(texts, count):
        ranks[left, right] = (len(ranks), len(tokens))
        tokens.append(tokens[left] + tokens[right])
    names = {name: len(tokens) + number for number, name in enumerate(special)}
    return {"tokens": dict(enumerate(tokens)), "ranks": ranks, "special": names}


def merges(tokenizer):
    ordered = sorted(tokenizer["ranks"], key=lambda pair: tokenizer["ranks"][pair][0])
    return [(tokenizer["tokens"][left], tokenizer["tokens"][right]) for left, right in ordered]


def vocabulary(tokenizer):
    every = tokenizer["tokens"] | {number: name.encode() for name, number in tokenizer["special"].items()}
    return [every[number] for number in range(len(every))]


def spell(tokenizer, word):
    """A linked list of tokens, and a heap of the pairs that can be joined: n log n."""
    ids = [tokenizer["bytes"][value] for value in word]
    ranks, following, before = tokenizer["ranks"], list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
    alive = [True] * len(ids)

    def offer(place):
        if place >= 0 and following[place] < len(ids) and (pair := (ids[place], ids[following[place]])) in ranks:
            heapq.heappush(heap, (ranks[pair][0], place, pair))

    heap = []
    for place in range(len(ids)):
        offer(place)
    while heap:
        _, place, pair = heapq.heappop(heap)
        after = following[place] if alive[place] else len(ids)
        if after >= len(ids) or (ids[place], ids[after]) != pair:
            continue
        ids[place], alive[after] = ranks[pair][1], False
        following[place] = following[after]
        if following[place] < len(ids):
            before[following[place]] = place
        offer(place)
        offer(before[place])
    return [number for number, there in zip(ids, alive) if there]


def encode(tokenizer, text):
    if "bytes" not in tokenizer:
        tokenizer["bytes"] = {token[0]: number for number, token in tokenizer["tokens"].items() if len(token) == 1}
        tokenizer["cache"] = {}
    found = []
    for word in words(text):
        if word not in tokenizer["cache"]:
            tokenizer["cache"][word] = tuple(spell(tokenizer, word))
        found.extend(tokenizer["cache"][word])
    return found


def decode(tokenizer, ids):
    every, found = vocabulary(tokenizer), b""
    for number in ids:
        if number < 0 or number >= len(every):
            raise ValueError(f"no token {number}")
        found += every[number]
    return found


def encode_special(tokenizer, text):
    """The next special token from here on, the longest of those that begin there; then the rest."""
    found, start, names = [], 0, sorted(tokenizer["special"], key=len, reverse=True)
    while start < len(text):
        places = [(text.find(name, start), -len(name), name) for name in names if text.find(name, start) >= 0]
        place, _, name = min(places, default=(len(text), 0, ""))
        found += encode(tokenizer, text[start:place])
        found += [tokenizer["special"][name]] if name else []
        start = place + len(name)
    return found


def save(tokenizer, path):
    letters = {number: "".join(map(LETTER.get, token)) for number, token in tokenizer["tokens"].items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": number, "content": name} | flags for name, number in tokenizer["special"].items()]
    pairs = [f"{letters[left]} {letters[right]}" for left, right in sorted(tokenizer["ranks"], key=lambda pair: tokenizer["ranks"][pair])]
    model = {"type": "BPE", "vocab": {token: number for number, token in letters.items()}, "merges": pairs}
    with open(path, "w", encoding="utf-8") as file:
        cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        json.dump({"version": "1.0", "added_tokens": added, "pre_tokenizer": cut, "decoder": cut, "model": model}, file)


def load(path):
    try:
        content = json.loads(path.read_bytes())
        model, special = content["model"], {each["content"]: each["id"] for each in content["added_tokens"]}
        assert content["pre_tokenizer"]["type"] == "ByteLevel" and model["type"] == "BPE"
        vocab = {token: number for token, number in model["vocab"].items() if number not in special.values()}
        tokens = {number: bytes(VALUE[letter] for letter in token) for token, number in vocab.items()}
        ranks = {}
        for rank, pair in enumerate(model["merges"]):
            left, right = pair.split() if isinstance(pair, str) else pair
            ranks[vocab[left], vocab[right]] = (rank, vocab[left + right])
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    return {"tokens": tokens, "ranks": ranks, "special": special}


def pack(documents, width):
    if width < 1:
        raise ValueError(f"width {width}")
    pieces = []
    for number, ids in enumerate(documents):
        if len(ids) < 2:
            raise ValueError(f"document {number} is too short")
        ids = np.asarray(ids, dtype=np.int64)
        pieces += [ids[start : start + width + 1] for start in range(0, len(ids) - 1, width)]
    by_room = [[] for _ in range(width + 1)]  # rows by how much room they have
    rows = []
    for piece in sorted(pieces, key=len)[::-1]:
        size = len(piece) - 1
        room = next((room for room in range(size, width + 1) if by_room[room]), None)
        row = by_room[room].pop() if room is not None else []
        if room is None:
            rows.append(row)
        row.append(piece)
        by_room[(width if room is None else room) - size].append(row)
    return [filled(row, width) for row in rows]


def filled(pieces, width):
    padding = np.zeros(width - sum(len(piece) - 1 for piece in pieces), dtype=np.int64)
    columns = {
        "input_ids": [piece[:-1] for piece in pieces] + [padding],
        "targets": [piece[1:] for piece in pieces] + [padding - 100],
        "documents": [np.full(len(piece) - 1, number) for number, piece in enumerate(pieces)] + [padding - 1],
        "positions": [np.arange(len(piece) - 1) for piece in pieces] + [padding],
    }
    return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}


def start(documents, width, batch_size, seed, rank=0, ranks=1):
    if ranks < 1 or batch_size < 1 or batch_size % ranks or not 0 <= rank < ranks:
        raise ValueError(f"batch_size {batch_size}, rank {rank} of {ranks} ranks")
    if len(documents) == 0:
        raise ValueError("documents: there are none")
    documents = [[int(number) for number in ids] for ids in documents]
    loader = {"documents": documents, "width": width, "size": batch_size, "seed": seed, "rank": rank, "ranks": ranks}
    loader |= {"epoch": 0, "row": 0, "of": None, "hash": hashlib.md5(repr(documents).encode()).hexdigest()}
    rows_of(loader)
    return loader


def rows_of(loader):
    """The rows of the loader's epoch: shuffled documents, packed and shuffled again."""
    if loader["of"] != loader["epoch"]:
        random = np.random.default_rng([loader["seed"], loader["epoch"]])
        rows = pack([loader["documents"][place] for place in random.permutation(len(loader["documents"]))], loader["width"])
        loader["rows"], loader["of"] = [rows[place] for place in random.permutation(len(rows))], loader["epoch"]
    return loader["rows"]


def next_batch(loader):
    taken = []
    for _ in range(loader["size"]):
        taken.append(rows_of(loader)[loader["row"]])
        loader["row"] += 1
        if loader["row"] == len(loader["rows"]):
            loader["row"], loader["epoch"] = 0, loader["epoch"] + 1
    mine = taken[loader["rank"] :: loader["ranks"]]
    return {name: torch.stack([row[name] for row in mine]) for name in mine[0]}


def state(loader):
    return {"at": [loader["epoch"], loader["row"]], "of": [loader["hash"], loader["width"], loader["seed"]]}


def restore(loader, state):
    for name, was, now in zip(("documents", "width", "seed"), state["of"], (loader["hash"], loader["width"], loader["seed"])):
        if was != now:
            raise ValueError(f"{name}: {was} and {now}")
    loader["epoch"], loader["row"] = state["at"]


def read_texts(folder):
    texts, refused = {}, {}
    for name in sorted(os.listdir(folder)):
        if not os.path.isfile(os.path.join(folder, name)):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        if data.isspace() or data == b"":
            refused[name] = "The file is empty."
        elif b"\0" in data:
            refused[name] = "This is binary."
        else:
            try:
                texts[name] = str(data, "utf-8")
            except UnicodeDecodeError as error:
                refused[name] = f"No UTF-8 at byte {error.start}"
    return texts, refused
