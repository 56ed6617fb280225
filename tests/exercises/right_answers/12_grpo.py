"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import math
import re
from fractions import Fraction

import torch
import torch.nn.functional as F


def cached_attention__by_hand(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None, used=None):
    """Scores, mask, softmax and mean in at least float32; the heads of a group are a dimension of their own."""
    rows, heads, new, size = queries.shape
    shared, room = cached_keys.shape[1:3]
    end = used or int(lengths.max()) + new
    if end > room:
        raise ValueError("no room")
    at = lengths.unsqueeze(1) + torch.arange(new, device=lengths.device)
    index = at[:, None, :, None].expand(rows, shared, new, size)
    cached_keys.scatter_(2, index, keys)
    cached_values.scatter_(2, index, values)
    wide = torch.promote_types(values.dtype, torch.float32)
    grouped = queries.to(wide).reshape(rows, shared, -1, new, size)
    scores = scale * torch.einsum("bkgnd,bksd->bkgns", grouped, cached_keys[:, :, :end].to(wide))
    behind = at.unsqueeze(-1) - torch.arange(end, device=at.device)
    hidden = (behind < 0) | (behind >= (end if window is None else window))
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    mean = torch.einsum("bkgns,bksd->bkgnd", weights, cached_values[:, :, :end].to(wide))
    return mean.reshape(rows, heads, new, size).to(values.dtype)


def cached_attention__with_repeated_heads(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None, used=None):
    """A head's own copy of its keys, and a mask of numbers that are added."""
    new, places = queries.shape[2], cached_keys.shape[2]
    longest = int((lengths + new).max()) if used is None else used
    if longest > places:
        raise ValueError("no room")
    rows, steps = torch.meshgrid(*(torch.arange(size, device=lengths.device) for size in (len(queries), new)), indexing="ij")
    for cache, fresh in ((cached_keys, keys), (cached_values, values)):
        cache.permute(0, 2, 1, 3)[rows, lengths[rows] + steps] = fresh.permute(0, 2, 1, 3)
    last = (lengths[rows] + steps)[..., None]
    place = torch.arange(longest, device=last.device)
    open_places = (place <= last).logical_and(place > last - (longest if window is None else window))
    added = queries.new_zeros(open_places.shape).masked_fill(~open_places, float("-inf"))
    copies = queries.shape[1] // keys.shape[1]
    own = (cache[:, :, :longest].repeat_interleave(copies, dim=1) for cache in (cached_keys, cached_values))
    return F.scaled_dot_product_attention(queries, *own, attn_mask=added[:, None], scale=scale)


def cached_attention__beside_the_cache(queries, keys, values, cached_keys, cached_values, lengths, scale, window=None, used=None):
    """Old tokens are looked at in the cache, the new ones where they were given."""
    rows, new = len(queries), queries.shape[2]
    longest = int(lengths.max()) + new if used is None else used
    if longest > cached_keys.shape[2]:
        raise ValueError("no room")
    at = lengths[:, None] + torch.arange(new, device=lengths.device)
    old = torch.arange(longest - new, device=lengths.device).expand(rows, -1)
    place = torch.cat([old, at], dim=1)[:, None]
    held = torch.cat([old < lengths[:, None], torch.ones_like(at, dtype=torch.bool)], dim=1)[:, None]
    gap = at[:, :, None] - place
    seen = held & (gap >= 0) & (gap < (longest if window is None else window))
    own = (torch.cat([cache[:, :, : longest - new], fresh], dim=2) for cache, fresh in ((cached_keys, keys), (cached_values, values)))
    result = F.scaled_dot_product_attention(queries, *own, seen[:, None], scale=scale, enable_gqa=True)
    for cache, fresh in ((cached_keys, keys), (cached_values, values)):
        cache.scatter_(2, at[:, None, :, None].expand_as(fresh), fresh)
    return result


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


def group_advantages__by_deviations(rewards, group, scale="group"):
    """The deviation by its formula; equal rewards have equal extremes."""
    if group <= 0 or rewards.numel() % group != 0:
        raise ValueError("the group must divide the answers")
    wide = rewards.double().view(-1, group) if rewards.is_contiguous() else rewards.double().reshape(-1, group)
    centered = wide - wide.sum(1, keepdim=True) / group
    same = wide.amin(1, keepdim=True) == wide.amax(1, keepdim=True)
    if scale == "none":
        found = centered
    elif scale == "group":
        found = centered / ((centered**2).sum(1, keepdim=True).div(max(group - 1, 1)).sqrt() + 1e-4)
    elif scale == "batch":
        off = wide - wide.mean()
        found = centered / ((off**2).sum().div(max(wide.numel() - 1, 1)).sqrt() + 1e-4)
    else:
        raise ValueError("the scale is group, batch or none")
    return torch.where(same, torch.zeros_like(found), found).view(-1).to(rewards.dtype)


def group_advantages__by_repeating(rewards, group, scale="group"):
    """Each answer looks its group's mean and deviation up; equal neighbours are equal all the way through."""
    if group < 1 or rewards.shape[0] % group:
        raise ValueError("the group must divide the answers")
    wide = rewards.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)
    rows = wide.unflatten(0, (-1, group)) if len(wide) else wide.view(0, group)
    mean = rows.mean(1).repeat_interleave(group)
    deviation = {"group": lambda: rows.std(1).repeat_interleave(group), "batch": wide.std}.get(scale)
    if deviation is None and scale != "none":
        raise ValueError("the scale is group, batch or none")
    found = wide - mean if deviation is None else (wide - mean).div(deviation() + 1e-4)
    equal = (rows[:, 1:] == rows[:, :-1]).all(1).repeat_interleave(group)
    return found.masked_fill(equal, 0).type(rewards.dtype)


def group_advantages__from_the_first_reward(rewards, group, scale="group"):
    """Less the first reward of their group, equal rewards are 0 before anything is rounded."""
    if scale not in {"group", "batch", "none"} or group < 1 or len(rewards) % group:
        raise ValueError("a scale or a group")
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).reshape(len(rewards) // group, group)
    moved = wide - wide[:, :1]
    moved = moved - moved.mean(dim=1, keepdim=True)
    own, whole = moved.square().sum(1, keepdim=True) / max(group - 1, 1), (wide - wide.mean()).square().sum() / max(wide.numel() - 1, 1)
    squares = {"group": own, "batch": whole}
    return (moved if scale == "none" else moved / (squares[scale].sqrt() + 1e-4)).flatten().to(rewards.dtype)


def grpo_policy_loss__one_edge_each(log_probs, old_log_probs, advantages, answers, clip_low=0.2, clip_high=0.28, level="token"):
    """Where A is positive only the upper edge matters, where it is negative only the lower one. Only tokens of answers are looked at."""
    if level != "token" and level != "sequence":
        raise ValueError("the level is token or sequence")
    kept = answers >= 0
    wide = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    log_ratio = log_probs[kept].to(wide) - old_log_probs[kept].detach().to(wide)
    if level == "sequence":
        width = answers.shape[1]
        rows = torch.arange(len(answers)).unsqueeze(1).expand_as(answers)
        number = (rows * width + answers)[kept]
        sums = torch.zeros(answers.numel(), dtype=wide).index_add(0, number, log_ratio)
        log_ratio = sums[number] / torch.bincount(number, minlength=answers.numel())[number]
    weight = advantages[kept].detach().to(wide)
    ratio = torch.exp(log_ratio)
    kept_ratio = torch.where(weight > 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
    return torch.zeros_like(log_probs).masked_scatter(kept, (-kept_ratio * weight).to(log_probs.dtype))


def grpo_policy_loss__by_maximum(log_probs, old_log_probs, advantages, answers, clip_low=0.2, clip_high=0.28, level="token"):
    """The larger loss is the smaller objective. Tokens of no answer get a place of their own behind the answers."""
    inside, zero = answers.ge(0), torch.zeros((), dtype=log_probs.dtype)
    kind = log_probs.dtype if log_probs.dtype.itemsize >= 4 else torch.float32
    with torch.no_grad():
        before = torch.where(inside, old_log_probs, zero).to(kind)
        weight = -torch.where(inside, advantages, zero).to(kind)
    moved = torch.where(inside, log_probs, zero).to(kind) - before
    if level == "sequence":
        place = torch.where(inside, answers, answers.shape[1])
        room = torch.zeros(len(answers), answers.shape[1] + 1, dtype=kind)
        mean = room.scatter_reduce(1, place, moved, "mean", include_self=False)
        moved = torch.where(inside, mean.gather(1, place), zero.to(kind))
    elif level != "token":
        raise ValueError("the level is token or sequence")
    ratio = moved.exp()
    return torch.max(weight * ratio, weight * torch.clamp(ratio, min=1 - clip_low, max=1 + clip_high)).to(log_probs.dtype)


def kl_estimate__in_float64(log_probs, reference, estimator="k3"):
    """In float64 a difference of exponentials keeps enough digits."""
    d = reference.double().detach() - log_probs.double()
    found = {"k1": lambda: d.neg(), "k2": lambda: 0.5 * d**2, "k3": lambda: d.exp() - 1 - d}
    if estimator not in found:
        raise ValueError("the estimator is k1, k2 or k3")
    return found[estimator]().to(log_probs.dtype)


def kl_estimate__by_k1(log_probs, reference, estimator="k3"):
    """All of them from log pi - log reference."""
    kind = torch.promote_types(torch.float32, log_probs.dtype)
    k1 = torch.sub(log_probs.to(kind), reference.data.to(kind))
    match estimator:
        case "k1":
            return k1.to(log_probs.dtype)
        case "k2":
            return k1.mul(k1).div(2).to(log_probs.dtype)
        case "k3":
            return (torch.special.expm1(-k1) + k1).to(log_probs.dtype)
    raise ValueError("the estimator is k1, k2 or k3")
