"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch
import torch.nn.functional as F


def bradley_terry_loss__by_softplus(chosen, rejected, margin=None, centering=0.0):
    """-log sigmoid(d) is softplus(-d)."""
    wide = torch.float64 if chosen.dtype == torch.float64 else torch.float32
    lead = chosen.to(wide) - rejected.to(wide)
    if margin is not None:
        lead = lead - margin.to(wide)
    return F.softplus(-lead) + centering * (chosen.to(wide) + rejected.to(wide)) ** 2


def bradley_terry_loss__by_cross_entropy(chosen, rejected, margin=None, centering=0.0):
    """The two rewards as logits, of which the first is right."""
    both = torch.stack([chosen, rejected], dim=1).to(torch.promote_types(chosen.dtype, torch.float32))
    shift = 0 if margin is None else torch.stack([margin, torch.zeros_like(margin)], dim=1).to(both.dtype)
    return -(both - shift).log_softmax(dim=1)[:, 0] + centering * both.sum(1).pow(2)


def bradley_terry_loss__by_logaddexp(chosen, rejected, margin=None, centering=0.0):
    """log(exp(chosen) + exp(rejected)) less the chosen one's own."""
    if chosen.dtype != torch.float64:
        chosen, rejected = chosen.float(), rejected.float()
    ahead = chosen if margin is None else chosen - margin.to(chosen.dtype)
    loss = torch.logaddexp(ahead, rejected) - ahead
    return loss + centering * torch.square(chosen + rejected) if centering else loss


def bradley_terry_loss__by_maximum(chosen, rejected, margin=None, centering=0.0):
    """max(-d, 0) + log(1 + exp(-|d|)): at 0 `maximum` gives each side half of the gradient, as it is to be."""
    wide = torch.promote_types(chosen.dtype, torch.float32)
    chosen, rejected = chosen.to(wide), rejected.to(wide)
    d = chosen - rejected - (torch.zeros_like(chosen) if margin is None else margin.to(wide))
    return torch.maximum(-d, torch.zeros_like(d)) + d.abs().neg().exp().log1p() + centering * (chosen + rejected) ** 2


def sequence_log_probs__by_index_add(token_log_probs, counted, documents, count):
    """All rows as one, with places for their sequences one behind the other; only what counts is looked at."""
    wide = token_log_probs.to(torch.promote_types(token_log_probs.dtype, torch.float32))
    rows = torch.arange(len(wide)).unsqueeze(1).expand_as(documents)
    places = (rows * count + documents)[counted]
    return torch.zeros(len(wide) * count, dtype=wide.dtype).index_add(0, places, wide[counted]).view(len(wide), count)


def sequence_log_probs__by_index_put(token_log_probs, counted, documents, count):
    """With accumulate=True, index_put adds."""
    wide = token_log_probs.double() if token_log_probs.dtype == torch.float64 else token_log_probs.float()
    rows, columns = torch.nonzero(counted, as_tuple=True)
    sums = torch.zeros(wide.shape[0], count, dtype=wide.dtype)
    return sums.index_put((rows, documents[rows, columns]), wide[rows, columns], accumulate=True)


def sequence_log_probs__with_a_place_for_the_rest(token_log_probs, counted, documents, count):
    """What does not count goes to a place of its own, which is cut off; its numbers are chosen away before that, as NaN stays NaN."""
    places = torch.where(counted, documents, count)
    kept = torch.where(counted, token_log_probs, torch.zeros((), dtype=token_log_probs.dtype))
    kept = kept.to(torch.promote_types(kept.dtype, torch.float32))
    sums = torch.zeros(len(kept), count + 1, dtype=kept.dtype)
    return torch.scatter_add(sums, 1, places, kept)[:, :count]


def sequence_log_probs__by_a_sparse_tensor(token_log_probs, counted, documents, count):
    """Numbers at the same place of a sparse tensor are added up when it is made dense."""
    wide = token_log_probs.to(torch.promote_types(token_log_probs.dtype, torch.float32))
    places = torch.stack([counted.nonzero()[:, 0], documents[counted]])
    return torch.sparse_coo_tensor(places, wide[counted], (len(wide), count)).to_dense()


def dpo_loss__by_softplus(chosen, rejected, reference_chosen, reference_rejected, beta, label_smoothing=0.0):
    """-log sigmoid(d) = softplus(-d), and the two terms differ by d: the smoothing adds its share of d."""
    with torch.no_grad():
        frozen = reference_chosen - reference_rejected
    d = beta * (chosen - rejected - frozen)
    return F.softplus(-d) + label_smoothing * d


def dpo_loss__by_rewards(chosen, rejected, reference_chosen, reference_rejected, beta, label_smoothing=0.0):
    """Implicit rewards, and binary cross entropy with soft labels."""
    better = beta * (chosen - reference_chosen.detach())
    worse = beta * (rejected - reference_rejected.detach())
    labels = torch.full_like(better, 1 - label_smoothing).detach()
    return F.binary_cross_entropy_with_logits(better - worse, labels, reduction="none")


def dpo_loss__by_log_softmax(chosen, rejected, reference_chosen, reference_rejected, beta, label_smoothing=0.0):
    policy = torch.stack([chosen, rejected])
    reference = torch.stack([reference_chosen.detach(), reference_rejected.detach()])
    logs = (beta * (policy - reference)).log_softmax(0)
    return -((1 - label_smoothing) * logs[0] + label_smoothing * logs[1])


def generalized_advantages__masked_first(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    """All differences at once, with nothing left behind the ends; then one step back for each time."""
    with torch.no_grad():
        time = torch.arange(values.shape[1])
        inside, final = time < lengths[:, None], time == lengths[:, None] - 1
        rewards, values = torch.where(inside, rewards, 0), torch.where(inside, values, 0)
        following = torch.where(final, last_values[:, None], torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1))
        deltas = torch.where(inside, rewards + gamma * following - values, 0)
        columns, carried = [], torch.zeros_like(last_values)
        for column in deltas.unbind(1)[::-1]:
            carried = column + gamma * lam * carried
            columns.append(carried)
        return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(values)


def generalized_advantages__by_doubling(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    """Sums over 1, 2, 4, ... differences: as many steps as the time has binary digits."""
    rewards, values, last_values = rewards.detach(), values.detach(), last_values.detach()
    size = values.shape[1]
    inside = torch.arange(size).expand(len(values), size) < lengths.unsqueeze(1)
    states = F.pad(values.masked_fill(~inside, 0), (0, 1)).scatter(1, lengths.unsqueeze(1), last_values.unsqueeze(1))
    sums = (rewards.masked_fill(~inside, 0) + gamma * states[:, 1:] - states[:, :-1]).masked_fill(~inside, 0)
    step, factor = 1, gamma * lam
    while step < size:
        sums = sums + factor * F.pad(sums[:, step:], (0, step))
        step, factor = 2 * step, factor * factor
    return sums


def generalized_advantages__by_lambda_returns(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    """A return mixes the next value, by 1 - lam, and the return after it, by lam; less the token's own value it is the advantage."""
    with torch.no_grad():
        found, coming, following = torch.zeros_like(values), last_values, last_values
        for time in reversed(range(values.shape[1])):
            inside = time < lengths
            here = rewards[:, time] + gamma * ((1 - lam) * following + lam * coming)
            coming, following = torch.where(inside, here, coming), torch.where(inside, values[:, time], following)
            found[:, time] = torch.where(inside, here - values[:, time], 0)
        return found


def generalized_advantages__by_a_matrix(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    """A triangle of the powers of gamma * lam."""
    size = values.shape[1]
    time = torch.arange(size)
    inside = time < lengths.view(-1, 1)
    clean = values.detach().where(inside, torch.zeros_like(values))
    states = torch.cat([clean, torch.zeros_like(clean[:, :1]) if size else last_values.detach().view(-1, 1) * 0], dim=1)
    states[torch.arange(len(values)), lengths] = last_values.detach()
    deltas = (rewards.detach() + gamma * states[:, 1:] - states[:, :-1]).where(inside, torch.zeros_like(values))
    apart = time.view(-1, 1) - time
    powers = torch.where(apart >= 0, (gamma * lam) ** apart.clamp(min=0).to(values.dtype), 0).to(values.dtype)
    found = deltas @ powers
    return found.where(inside, torch.zeros_like(found))


def ppo_policy_loss__by_maximum(log_probs, old_log_probs, advantages, clip=0.2):
    """The larger loss is the smaller objective."""
    with torch.no_grad():
        weight = -advantages
    ratio = torch.exp(log_probs - old_log_probs.detach())
    return torch.max(weight * ratio, weight * torch.clamp(ratio, min=1 - clip, max=1 + clip))


def ppo_policy_loss__one_edge_each(log_probs, old_log_probs, advantages, clip=0.2):
    """Where A is positive only the upper edge matters, where it is negative only the lower one."""
    advantages = advantages.detach()
    ratio = (log_probs - old_log_probs.detach()).exp()
    kept = torch.where(advantages > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip))
    return -kept * advantages


def ppo_policy_loss__by_cases(log_probs, old_log_probs, advantages, clip=0.2):
    """Where nothing more is gained the loss is a constant."""
    old, advantages = old_log_probs.detach(), advantages.detach()
    ratio = torch.exp(log_probs - old)
    up = (advantages > 0) & (ratio > 1 + clip)
    down = (advantages < 0) & (ratio < 1 - clip)
    loss = torch.where(up, -(1 + clip) * advantages, -ratio * advantages)
    return torch.where(down, -(1 - clip) * advantages, loss)
