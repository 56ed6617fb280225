"""Solutions of chapter 12. Each body with the reason why it is written this way."""

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.preference import log_probs as preference_log_probs
from shared.rl.number_pattern import NUMBER


def cached_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    used: int | None = None,
) -> Tensor:
    """Rows and places are indexed together, so that each row writes at its own length. Nobody looks behind the longest row."""
    places = lengths[:, None] + torch.arange(queries.shape[2], device=lengths.device)
    if used is None:
        used = int(places.max()) + 1
    if used > cached_keys.shape[2]:
        raise ValueError(f"The cache has {cached_keys.shape[2]} places, and a row needs {used}: allocate a larger one.")
    rows = torch.arange(len(queries), device=lengths.device)[:, None]
    cached_keys[rows, :, places] = keys.transpose(1, 2)
    cached_values[rows, :, places] = values.transpose(1, 2)
    seen, last = torch.arange(used, device=lengths.device), places[:, None, :, None]
    allowed = seen <= last if window is None else (seen <= last) & (seen > last - window)
    keys, values = cached_keys[:, :, :used], cached_values[:, :, :used]
    return F.scaled_dot_product_attention(queries, keys, values, allowed, scale=scale, enable_gqa=True)


def draw_tokens(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """What is cut off becomes -inf, so that the softmax of the rest adds up to 1. A token is kept by top-p where those before it have not
    yet reached it. The largest logit is subtracted first: divided by a small temperature, the others may overflow to -inf without harm."""
    logits = logits.double()
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.new_zeros(len(logits))
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        scaled = scaled.where(scaled >= scaled.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        likeliest, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, likeliest.cumsum(dim=-1) - likeliest < top_p)
        scaled = scaled.where(kept, -torch.inf)
    log_probs = scaled.log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    place = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, place, right=True)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def number_reward(answer: str, expected: str) -> float:
    """Fractions compare exactly, where 0.1 + 0.2 as a float is not 0.3. Python refuses to read whole numbers of over 4,300 digits."""
    found, right = NUMBER.findall(answer)[-1:], NUMBER.fullmatch(expected.strip())
    texts = [*found, right.group()] if right else []
    if len(texts) < 2 or max(map(len, texts)) > 1000:
        return 0.0
    try:
        given, wanted = (Fraction(text.replace(",", "")) for text in texts)
    except ZeroDivisionError:
        return 0.0
    return float(given == wanted)


def group_advantages(rewards: Tensor, group: int, scale: str = "group") -> Tensor:
    """Rounding leaves a rest where equal rewards are less their mean, and a division makes it large: such groups are found by comparing."""
    if group < 1 or len(rewards) % group:
        raise ValueError(f"group is {group} for {len(rewards)} answers: it must be at least 1 and divide them.")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is {scale!r}: choose group, batch or none.")
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).reshape(-1, group)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    elif scale == "batch":
        advantages = advantages / (groups.std() + 1e-4)
    differ = (groups != groups[:, :1]).any(dim=1, keepdim=True)
    return advantages.where(differ, 0).flatten().to(rewards.dtype)


def grpo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    answers: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    level: str = "token",
) -> Tensor:
    """What belongs to no answer is chosen away before it takes part in anything. An answer's mean is a sum by its number, divided by a sum
    of ones, and each of its tokens looks the result up."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level!r}: choose token or sequence.")
    wide, counted = torch.promote_types(log_probs.dtype, torch.float32), answers >= 0
    moved = (log_probs.to(wide) - old_log_probs.detach().to(wide)).where(counted, 0)
    advantages = advantages.detach().to(wide).where(counted, 0)
    if level == "sequence":
        sums, tokens = (
            preference_log_probs.sequence_log_probs(each, counted, answers, answers.shape[1]) for each in (moved, torch.ones_like(moved))
        )
        moved = (sums / tokens.clamp(min=1)).gather(1, answers.clamp(min=0))
    ratio = moved.exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return losses.where(counted, 0).to(log_probs.dtype)


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """`expm1` keeps the digits that e^d - 1 loses where d is small."""
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    moved = reference.detach().to(wide) - log_probs.to(wide)
    if estimator == "k1":
        found = -moved
    elif estimator == "k2":
        found = moved.square() / 2
    elif estimator == "k3":
        found = moved.expm1() - moved
    else:
        raise ValueError(f"estimator is {estimator!r}: choose k1, k2 or k3.")
    return found.to(log_probs.dtype)
