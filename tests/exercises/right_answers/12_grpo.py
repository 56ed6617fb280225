"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch


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
