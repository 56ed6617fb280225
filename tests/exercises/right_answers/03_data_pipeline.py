"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F


def merge_pair__looks_at_what_was_written(ids, pair, new_id):
    merged, open_left = [], False  # whether the last token written may still be joined
    for token in ids:
        if open_left and token == pair[1]:
            merged[-1] = new_id
            open_left = False
        else:
            merged.append(token)
            open_left = token == pair[0]
    return merged


def merge_pair__marked_and_filtered(ids, pair, new_id):
    used = set()
    starts = set()
    for place, found in enumerate(zip(ids, ids[1:])):
        if found == tuple(pair) and place not in used:
            starts.add(place)
            used |= {place, place + 1}
    return [new_id if place in starts else token for place, token in enumerate(ids) if place in starts or place not in used]


def pack_documents__joined_pieces(documents, seq):
    if any(len(document) < 2 for document in documents):
        raise ValueError("a document without a prediction")
    used = sum(len(document) - 1 for document in documents)
    if used > seq:
        raise ValueError("the documents do not fit")
    parts = {
        "input_ids": torch.cat([document[:-1].to(torch.int64) for document in documents]),
        "targets": torch.cat([document[1:].to(torch.int64) for document in documents]),
        "documents": torch.cat([torch.full((len(document) - 1,), number) for number, document in enumerate(documents)]),
        "positions": torch.cat([torch.arange(len(document) - 1) for document in documents]),
    }
    empty = {"input_ids": 0, "targets": -100, "documents": -1, "positions": 0}
    return {name: F.pad(part, (0, seq - used), value=empty[name]) for name, part in parts.items()}


def pack_documents__token_by_token(documents, seq):
    rows = []
    for number, document in enumerate(documents):
        ids = document.tolist()
        if len(ids) in (0, 1):
            raise ValueError("too short")
        rows += [(here, after, number, place) for place, (here, after) in enumerate(itertools.pairwise(ids))]
    if len(rows) > seq:
        raise ValueError("too long")
    rows += [(0, -100, -1, 0)] * (seq - len(rows))
    columns = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    return dict(zip(("input_ids", "targets", "documents", "positions"), columns))


def fill_in_middle__pieces_by_name(text, first, second, mode, encode, tokens):
    if first < 0 or second < first or len(text) < second:
        raise ValueError("cuts")
    parts = {"p": text[:first], "m": text[first:second], "s": text[second:]}
    marks = {"P": tokens.prefix, "M": tokens.middle, "S": tokens.suffix, "E": tokens.end}
    if mode not in ("psm", "spm"):
        raise ValueError("mode")
    ids = []
    for letter in {"psm": "PpSsMmE", "spm": "PSsMpmE"}[mode]:
        ids.extend(encode(parts[letter]) if letter in parts else [marks[letter]])
    return ids


def fill_in_middle__sums_of_lists(text, first, second, mode, encode, tokens):
    match mode:
        case "psm" | "spm" if not (first >= 0 and second >= first and second <= len(text)):
            raise ValueError("cuts")
        case "psm":
            front = [tokens.prefix] + encode(text[0:first]) + [tokens.suffix] + encode(text[second : len(text)]) + [tokens.middle]
        case "spm":
            front = [tokens.prefix, tokens.suffix] + encode(text[second:]) + [tokens.middle] + encode(text[:first])
        case _:
            raise ValueError("mode")
    return front + encode(text[first:second]) + [tokens.end]


def mask_tokens__by_index(input_ids, special, selection, fate, replacements, mask_id, rate=0.15):
    inputs, targets = input_ids.clone(), torch.full_like(input_ids, -100)
    for row, column in ((selection < rate) & special.logical_not()).nonzero().tolist():
        targets[row, column] = input_ids[row, column]
        if fate[row, column] < 0.8:
            inputs[row, column] = mask_id
        elif fate[row, column] < 0.9:
            inputs[row, column] = replacements[row, column]
    return inputs, targets


def mask_tokens__masked_fill(input_ids, special, selection, fate, replacements, mask_id, rate=0.15):
    left_alone = special | (selection >= rate)
    targets = input_ids.masked_fill(left_alone, -100)
    changed = torch.where(fate < 0.8, torch.full_like(input_ids, mask_id), torch.where(fate < 0.9, replacements, input_ids))
    return torch.where(left_alone, input_ids, changed), targets


def corrupt_spans__groups(input_ids, noise, sentinels, end_id):
    marks = iter(sentinels)
    inputs, targets = [], []
    for cut, run in itertools.groupby(zip(input_ids.tolist(), noise.tolist()), key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        if not cut:
            inputs += tokens
            continue
        mark = next(marks, None)
        if mark is None:
            raise ValueError("too few sentinels")
        inputs.append(mark)
        targets += [mark, *tokens]
    return torch.tensor(inputs + [end_id], dtype=torch.int64), torch.tensor(targets + [end_id], dtype=torch.int64)


def corrupt_spans__vectorised(input_ids, noise, sentinels, end_id):
    tokens, cut = input_ids.numpy(), noise.numpy()
    begins = cut & ~np.concatenate([[False], cut[:-1]]) if len(cut) else cut
    if begins.sum() > len(sentinels):
        raise ValueError("too few sentinels")
    marks = np.array(sentinels[: begins.sum()], dtype=np.int64)
    number = np.cumsum(begins) - 1
    inputs = np.where(begins, marks[number] if len(marks) else tokens, tokens)[~cut | begins]
    targets = np.insert(tokens[cut], np.flatnonzero(begins[cut]), marks)
    return torch.tensor([*inputs.tolist(), end_id]), torch.tensor([*targets.tolist(), end_id])
