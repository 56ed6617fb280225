"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import math
import re
from fractions import Fraction

import torch
import torch.nn.functional as F


def cached_attention__by_hand(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None):
    """Scores, mask, softmax and mean in at least float32; the heads of a group are a dimension of their own."""
    rows, heads, new, size = queries.shape
    shared, room = cached_keys.shape[1:3]
    end = int(lengths.max()) + new
    if end > room:
        raise ValueError("no room")
    at = lengths.unsqueeze(1) + torch.arange(new)
    index = at[:, None, :, None].expand(rows, shared, new, size)
    cached_keys.scatter_(2, index, keys)
    cached_values.scatter_(2, index, values)
    wide = torch.promote_types(values.dtype, torch.float32)
    grouped = queries.to(wide).reshape(rows, shared, -1, new, size)
    scores = scale * torch.einsum("bkgnd,bksd->bkgns", grouped, cached_keys[:, :, :end].to(wide))
    behind = at.unsqueeze(-1) - torch.arange(end)
    hidden = (behind < 0) | (behind >= (end if window is None else window))
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    mean = torch.einsum("bkgns,bksd->bkgnd", weights, cached_values[:, :, :end].to(wide))
    return mean.reshape(rows, heads, new, size).to(values.dtype)


def cached_attention__with_repeated_heads(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None):
    """A head's own copy of its keys, and a mask of numbers that are added."""
    new, places = queries.shape[2], cached_keys.shape[2]
    if bool((lengths + new > places).any()):
        raise ValueError("no room")
    rows, steps = torch.meshgrid(torch.arange(queries.shape[0]), torch.arange(new), indexing="ij")
    for cache, fresh in ((cached_keys, keys), (cached_values, values)):
        cache.permute(0, 2, 1, 3)[rows, lengths[rows] + steps] = fresh.permute(0, 2, 1, 3)
    longest = int((lengths + new).max())
    last = (lengths[rows] + steps)[..., None]
    place = torch.arange(longest)
    open_places = (place <= last).logical_and(place > last - (longest if window is None else window))
    added = torch.zeros(open_places.shape, dtype=queries.dtype).masked_fill(~open_places, float("-inf"))
    copies = queries.shape[1] // keys.shape[1]
    own = (cache[:, :, :longest].repeat_interleave(copies, dim=1) for cache in (cached_keys, cached_values))
    return F.scaled_dot_product_attention(queries, *own, attn_mask=added[:, None], scale=scale)


def draw_tokens__in_the_order_of_likelihood(logits, uniform, temperature=1.0, top_k=None, top_p=None):
    """Sorted once; top-k is the first places of the order and those equal to the last of them."""
    wide = logits.to(torch.float64)
    if temperature == 0:
        best = wide.max(dim=1, keepdim=True).values
        return (wide == best).to(torch.int64).argmax(1), wide.new_zeros(len(wide))
    ordered, ids = wide.sub(wide.max(dim=1, keepdim=True).values).div(temperature).sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        least = ordered[:, min(top_k, ordered.shape[1]) - 1, None]
        ordered = ordered.masked_fill(ordered < least, float("-inf"))
    odds = ordered.exp()
    if top_p is not None and top_p != 1:
        shares = odds / odds.sum(1, keepdim=True)
        before = torch.cat([torch.zeros_like(shares[:, :1]), shares.cumsum(1)[:, :-1]], dim=1)
        odds = odds.masked_fill(before >= top_p, 0.0)
    by_id = torch.empty_like(odds).scatter_(1, ids, odds)
    edges = by_id.cumsum(1)
    edges = edges / edges[:, -1:]
    drawn = (edges <= uniform.double().unsqueeze(1)).sum(1)
    picked = by_id.gather(1, drawn[:, None])[:, 0]
    return drawn, picked.log() - by_id.sum(1).log()


def draw_tokens__with_bisection_of_thresholds(logits, uniform, temperature=1.0, top_k=None, top_p=None):
    """Top-p by a place in the order, looked up for each token; argmax finds the first place behind the number."""
    scores = logits.detach().double().clone()
    if not temperature:
        tokens = torch.max(scores, dim=-1, keepdim=True).values.eq(scores).byte().argmax(dim=-1)
        return tokens, torch.zeros(tokens.shape, dtype=torch.float64)
    scores = (scores - scores.max(-1, keepdim=True)[0]) / temperature
    if top_k and top_k < scores.size(-1):
        scores[scores < torch.sort(scores, descending=True).values[:, top_k - 1 : top_k]] = -math.inf
    shares = torch.softmax(scores, -1)
    if top_p and top_p < 1.0:
        order = torch.argsort(shares, dim=-1, descending=True, stable=True)
        ranked = torch.gather(shares, -1, order)
        count = (ranked.cumsum(-1) < top_p).sum(-1, keepdim=True) + 1
        rank = torch.argsort(order, dim=-1)
        shares = shares * (rank < count)
        shares = shares / shares.sum(-1, keepdim=True)
    cumulative = shares.cumsum(-1)
    beyond = cumulative > uniform.double()[:, None] * cumulative[:, -1:]
    tokens = beyond.to(torch.uint8).argmax(-1)
    return tokens, shares[torch.arange(len(shares)), tokens].log()


def number_reward__in_two_patterns(answer, expected):
    """A pattern that finds candidates, each of which a second one cuts to its length; numerators are multiplied crosswise."""
    whole = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
    form = re.compile(rf"(?P<over>[+-]?{whole})/(?P<under>{whole})|(?P<plain>[+-]?(?:{whole}?\.\d+|{whole}))", re.ASCII)

    def read(match):
        parts = match.groupdict()
        if len(match.group()) > 1000:
            return None
        if parts["plain"] is None:
            over, under = int(parts["over"].replace(",", "")), int(parts["under"].replace(",", ""))
            return (over, under) if under else None
        digits = parts["plain"].replace(",", "").partition(".")
        return int(digits[0] + digits[2]), 10 ** len(digits[2])

    place, last, right = 0, None, form.fullmatch(expected.strip())
    begin = re.compile(r"(?<!\w)(?:[+-]?\.?[0-9])")
    while found := begin.search(answer, place):
        last = form.match(answer, found.start())
        place = last.end()
    left, wanted = (last and read(last)), (right and read(right))
    return 1.0 if left and wanted and left[0] * wanted[1] == wanted[0] * left[1] else 0.0


def number_reward__by_hand(answer, expected):
    """A reader without any pattern, character by character."""
    digits = set("0123456789")

    def run(text, place):
        while place < len(text) and text[place] in digits:
            place += 1
        return place

    def whole(text, place):
        end = run(text, place)
        if 1 <= end - place <= 3:
            ends = [end]
            while text[ends[-1] : ends[-1] + 1] == "," and run(text[: ends[-1] + 5], ends[-1] + 1) == ends[-1] + 4:
                ends.append(ends[-1] + 4)
            if len(ends) > 1 and text[ends[-1] : ends[-1] + 1] in digits:
                ends.pop()
            end = ends[-1]
        return end

    def number(text, start):
        """Where the number that begins here ends; the same place where none does."""
        place = start + (text[start : start + 1] in ("+", "-"))
        end = whole(text, place)
        if text[end : end + 1] == "." and run(text, end + 1) > end + 1:
            return run(text, end + 1)
        if end > place and text[end : end + 1] == "/" and whole(text, end + 1) > end + 1:
            return whole(text, end + 1)
        return end if end > place else start

    def value(text):
        return Fraction(text.replace(",", "")) if len(text) <= 1000 else None

    place, last = 0, None
    while place < len(answer):
        behind_word = place > 0 and (answer[place - 1].isalnum() or answer[place - 1] == "_")
        end = place if behind_word else number(answer, place)
        last = answer[place:end] if end > place else last
        place = max(end, place + 1)
    expected = expected.strip()
    if last is None or not expected or number(expected, 0) != len(expected):
        return 0.0
    try:
        return float(None not in (value(last), value(expected)) and value(last) == value(expected))
    except ZeroDivisionError:
        return 0.0
