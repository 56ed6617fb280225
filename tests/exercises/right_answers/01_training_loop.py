"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch

from shared.totals import Totals, add_totals


def cross_entropy__log_softmax_of_the_counted_rows(logits, targets):
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows, wanted = exact.reshape(-1, exact.shape[-1]), targets.reshape(-1)
    rows, wanted = rows[wanted != -100], wanted[wanted != -100]
    chosen = rows.log_softmax(dim=-1)[torch.arange(len(wanted)), wanted]
    return -chosen.sum(), torch.tensor(len(wanted))


def cross_entropy__largest_logit_subtracted_by_hand(logits, targets):
    exact = logits if logits.dtype == torch.float64 else logits.float()
    shifted = exact - exact.detach().amax(dim=-1, keepdim=True)
    one_hot = torch.arange(logits.shape[-1]) == targets.unsqueeze(-1)  # all False where the target is -100
    target_logits = shifted.masked_fill(~one_hot, 0).sum(dim=-1)
    mask = targets.ne(-100)
    losses = shifted.exp().sum(dim=-1).log() - target_logits
    return (losses * mask).sum(), mask.long().sum()


def accumulate_gradients__running_sums(model, microbatches, objective):
    total = None
    for i in range(len(microbatches)):
        part = objective(model, microbatches[i])
        part.loss_sum.backward()
        part = Totals(part.loss_sum.detach(), part.token_count, {name: value.detach() for name, value in part.metrics.items()})
        total = part if total is None else add_totals([total, part])
    return total


def accumulate_gradients__autograd_backward(model, microbatches, objective):
    def one(microbatch):
        totals = objective(model, microbatch)
        torch.autograd.backward(totals.loss_sum)
        return add_totals([totals])

    return add_totals([one(microbatch) for microbatch in microbatches])


def apply_update__plain_number(model, optimizer, token_count):
    count = token_count.item()
    if not count:
        raise ValueError("nothing to learn from")
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        parameter.grad.mul_(1 / count)
    optimizer.step()


def apply_update__all_at_once(model, optimizer, token_count):
    if token_count.item() < 1:
        raise ValueError(f"token_count is {token_count}")
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in gradients:
        torch.div(gradient, token_count, out=gradient)
    return optimizer.step()


def train_step__gradients_removed_by_hand(model, optimizer, microbatches, objective, runner, reducer, updater):
    for parameter in model.parameters():
        parameter.grad = None
    totals = reducer(model, runner(model, microbatches, objective))
    updater(model, optimizer, totals.token_count)
    return totals


def train_step__keywords(model, optimizer, microbatches, objective, runner, reducer, updater):
    model.zero_grad()
    totals = runner(model=model, microbatches=microbatches, objective=objective)
    loss_sum, token_count, metrics = reducer(model, totals)
    updater(model=model, optimizer=optimizer, token_count=token_count)
    return Totals(loss_sum, token_count, metrics)


def evaluate__inference_mode(model, batches, objective):
    training = [module for module in model.modules() if module.training]
    try:
        model.train(False)
        with torch.inference_mode():
            parts = [objective(model, batch) for batch in batches]
    finally:
        for module in training:
            module.training = True
    return add_totals(parts)


def evaluate__running_sums(model, batches, objective):
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        total = None
        for batch in batches:
            with torch.no_grad():
                part = objective(model, batch)
            total = add_totals([part] if total is None else [total, part])
        return total
    finally:
        for module in model.modules():
            module.training = before[module]


def sample_next__mask_below_the_kth(logits, temperature=1.0, top_k=None, generator=None):
    if temperature < 0 or (top_k is not None and top_k <= 0):
        raise ValueError("temperature and top_k must be positive")
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        smallest = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def sample_next__gumbel(logits, temperature=1.0, top_k=None, generator=None):
    if temperature < 0:
        raise ValueError("temperature")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k")
    values, ids = logits.double().sort(dim=-1, descending=True)
    values, ids = values[:, :top_k], ids[:, :top_k]
    if temperature == 0:
        return ids[:, 0]
    uniform = torch.rand(values.shape, generator=generator, dtype=torch.float64)
    noise = -(-uniform.log()).log()
    return ids.gather(1, (values / temperature + noise).argmax(1, keepdim=True)).view(-1)


def sample_next__cumulative_sum(logits, temperature=1.0, top_k=None, generator=None):
    if temperature < 0:
        raise ValueError("temperature")
    if top_k is not None and top_k < 1:
        raise ValueError("top_k")
    if temperature == 0:
        return logits.max(dim=-1).indices
    values, ids = torch.topk(logits.float(), min(top_k or logits.size(-1), logits.size(-1)))
    reached = (values / temperature).softmax(dim=-1).cumsum(dim=-1)
    drawn = (reached < torch.rand(len(logits), 1, generator=generator)).sum(dim=-1, keepdim=True)
    return ids.gather(-1, drawn.clamp(max=values.shape[-1] - 1)).squeeze(-1)
