"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch
import torch.nn.functional as F


def top_k_routing__by_a_sort(scores, k, normalize, scaling=1.0, bias=None, groups=1, best_groups=1):
    """Everything is sorted; groups are ranked by two sorts; DeepSeek's tiny constant in the denominator."""
    with torch.no_grad():
        biased = scores + (torch.zeros_like(scores) if bias is None else bias)
        if groups > 1:
            members = biased.reshape(*biased.shape[:-1], groups, biased.size(-1) // groups)
            two = members.sort(dim=-1, descending=True)[0][..., :2].sum(-1)
            ranks = two.argsort(-1, descending=True).argsort(-1)
            biased = torch.where((ranks < best_groups)[..., None], members, float("-inf")).reshape(biased.shape)
        chosen = torch.sort(biased, dim=-1, descending=True)[1][..., :k]
    weights = torch.take_along_dim(scores, chosen, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return scaling * weights, chosen


def top_k_routing__one_expert_after_the_other(scores, k, normalize, scaling=1.0, bias=None, groups=1, best_groups=1):
    """k times the largest, which is then taken out; the groups' mask is repeated for each expert."""
    left = scores.detach().clone() if bias is None else scores.detach() + bias.detach()
    size = scores.shape[-1] // groups
    if groups > 1:
        parts = torch.stack(left.split(size, dim=-1), dim=-2)
        first = parts.max(-1, keepdim=True)
        second = parts.scatter(-1, first.indices, float("-inf")).max(-1).values
        closed = torch.ones_like(second).scatter(-1, (first.values[..., 0] + second).topk(best_groups).indices, 0.0).bool()
        left = left.masked_fill(closed.repeat_interleave(size, dim=-1), float("-inf"))
    picks = []
    for _ in range(k):
        picks.append(left.argmax(dim=-1, keepdim=True))
        left = left.scatter(-1, picks[-1], float("-inf"))
    experts = torch.cat(picks, dim=-1)
    weights = scores.gather(-1, experts)
    total = weights.sum(-1, keepdim=True)
    return (torch.where(total == 0, weights, weights / total.masked_fill(total == 0, 1)) if normalize else weights) * scaling, experts


def balance_loss__by_bincount(probabilities, experts, valid, over_row=None):
    """Rows and experts are numbered together, and what does not count is left out by indexing."""
    batch, _, size = probabilities.shape
    rows = torch.arange(batch).view(-1, 1, 1)
    counts = torch.bincount((rows * size + experts)[valid].flatten(), minlength=batch * size).view(batch, size).to(probabilities.dtype)
    if over_row is not None:
        counts = over_row(counts)
    n = counts.sum(1, keepdim=True) / experts.size(2)
    share = counts / n.masked_fill(n == 0, 1.0)
    return torch.einsum("be,bse->", share, probabilities.masked_fill(~valid[:, :, None], 0.0))


def balance_loss__by_token(probabilities, experts, valid, over_row=None):
    """Each valid token's sum of its probabilities, weighted by its row's shares."""
    ones = valid[:, :, None].expand_as(experts).reshape(len(valid), -1).to(probabilities.dtype)
    counts = probabilities.new_zeros(len(valid), probabilities.shape[2]).scatter_add(1, experts.reshape(len(valid), -1), ones)
    counts = over_row(counts) if over_row else counts
    share = counts * experts.shape[2] / counts.sum(1).clamp_min(1)[:, None]
    share = torch.where(valid.unsqueeze(2), share.unsqueeze(1), torch.zeros((), dtype=share.dtype))
    return (share * torch.where(valid.unsqueeze(2), probabilities, 0)).sum()


def z_loss__by_indexing(logits, valid):
    return torch.logsumexp(logits[valid], -1).pow(2).sum()


def z_loss__by_the_largest(logits, valid):
    """The largest by hand, and a dot product."""
    logits = logits.masked_fill(~valid[..., None], 0.0)
    largest = logits.detach().max(-1, keepdim=True).values
    z = (logits - largest).exp().sum(-1).log() + largest[..., 0]
    z = z.masked_fill(~valid, 0).flatten()
    return torch.dot(z, z)


def dispatch__by_unique_keys(experts, num_experts):
    """Keys that no two choices share, so that any sort will do; counts by ones added up."""
    choices = experts.numel()
    flat = experts.reshape(-1)
    keys = flat * max(choices, 1) + torch.arange(choices)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
    return keys.sort().values % max(choices, 1), counts[:-1]


def dispatch__by_searching(experts, num_experts):
    """The ends of the experts' parts are found in the sorted row."""
    values, order = torch.sort(experts.contiguous().view(-1), stable=True)
    edges = torch.searchsorted(values, torch.arange(num_experts + 1))
    return order, edges.diff()


def combine__by_index_add(rows, order, weights):
    """Each row is weighted where it lies, and added to its token."""
    wide = torch.promote_types(rows.dtype, weights.dtype)
    tokens, k = weights.shape
    weighted = rows.to(wide) * weights.reshape(-1).to(wide)[order][:, None]
    return torch.zeros(tokens, rows.shape[1], dtype=wide).index_add(0, order // k, weighted).to(rows.dtype)


def combine__by_scattered_places(rows, order, weights):
    """The inverse permutation is written, not sorted; a batched product adds up."""
    wide = torch.promote_types(rows.dtype, weights.dtype)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    by_token = rows[place].reshape(*weights.shape, rows.shape[1])
    return torch.bmm(weights.to(wide).unsqueeze(1), by_token.to(wide)).squeeze(1).to(rows.dtype)


def combine__place_by_place(rows, order, weights):
    """The k places one after the other, through embedding look-ups."""
    inverse = torch.argsort(order).view(weights.shape)
    total = 0
    for place in range(weights.shape[1]):
        total = total + F.embedding(inverse[:, place], rows) * weights[:, place : place + 1]
    return total.to(rows.dtype)


def exchange_rows__through_ctx(rows, sent, received, group):
    """Everything in ctx, narrow slices, and lists of its own."""

    class AllToAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, leaving, arriving, ranks):
            ctx.numbers, ctx.ranks = (tuple(leaving), tuple(arriving)), ranks
            return move(x, leaving, arriving, ranks)

        @staticmethod
        def backward(ctx, gradient):
            leaving, arriving = ctx.numbers
            return move(gradient, arriving, leaving, ctx.ranks), None, None, None

    def slices(tensor, numbers):
        starts = [sum(numbers[:place]) for place in range(len(numbers))]
        return [tensor.narrow(0, start, number) for start, number in zip(starts, numbers)]

    def move(x, leaving, arriving, ranks):
        x = x if x.is_contiguous() else x.contiguous()
        y = torch.empty((sum(arriving), x.shape[1]), dtype=x.dtype, device=x.device)
        ranks.all_to_all(slices(y, arriving), slices(x, leaving))
        return y

    return AllToAll.apply(rows, sent, received, group)


def exchange_rows__asynchronously(rows, sent, received, group):
    """Started, and waited for; the gradient goes through a function of the same kind, so that it has a derivative too."""

    def start(x, here, there):
        y = torch.zeros(sum(there), *x.shape[1:], dtype=x.dtype)
        work = group.all_to_all(torch.split(y, list(there)), torch.split(x.contiguous(), list(here)), asynchronous=True)
        work.wait()
        return y

    def function(here, there):
        class Move(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return start(x.detach(), here, there)

            @staticmethod
            def backward(ctx, gradient):
                return function(there, here)(gradient)

        return Move.apply

    return function(sent, received)(rows)


def gradient_ranks__by_conditions(pipeline, data, context, tensor, expert, num_experts):
    """Every group by a condition on the coordinates of all ranks."""
    import itertools

    from shared.moe.parallel.groups import RankGroups

    places = list(itertools.product(range(pipeline), range(data), range(context), range(tensor)))
    lines = []
    for pp, d, cp, tp in places:
        stage = [(rank, other, c) for rank, (p, other, c, t) in enumerate(places) if (p, t) == (pp, tp)]
        lines.append(
            RankGroups(
                experts=(d % expert * num_experts // expert, (d % expert + 1) * num_experts // expert),
                exchange=[rank for rank, other, c in stage if c == cp and other // expert == d // expert],
                same_experts=[rank for rank, other, _ in stage if (other - d) % expert == 0],
                everything_else=[rank for rank, *_ in stage],
            )
        )
    return lines


def gradient_ranks__by_a_grid(pipeline, data, context, tensor, expert, num_experts):
    """The grid of ranks as a tensor, with a dimension for the place within an exchange."""
    from shared.moe.parallel.groups import RankGroups

    grid = torch.arange(pipeline * data * context * tensor).reshape(pipeline, data // expert, expert, context, tensor)
    found = {}
    for p, copy, place, c, t in torch.cartesian_prod(*[torch.arange(size) for size in grid.shape]).tolist():
        experts = torch.arange(num_experts).chunk(expert)[place].tolist()
        exchange, same, rest = grid[p, copy, :, c, t], grid[p, :, place, :, t], grid[p, ..., t]
        lists = [sorted(part.flatten().tolist()) for part in (exchange, same, rest)]
        found[int(grid[p, copy, place, c, t])] = RankGroups((experts[0], experts[-1] + 1), *lists)
    return [found[rank] for rank in sorted(found)]
