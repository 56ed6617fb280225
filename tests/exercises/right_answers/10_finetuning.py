"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch
import torch.nn.functional as F


def assistant_mask__by_characters(offsets, answers):
    """A row of all characters, of which the answers' are marked."""
    length = max([0, *(stop for _, stop in offsets), *(stop for _, stop in answers)])
    marked = torch.zeros(length, dtype=torch.bool)
    for start, stop in answers:
        marked[start:stop] = True
    return torch.tensor([bool(marked[start:stop].any()) for start, stop in offsets]).bool()


def assistant_mask__by_search(offsets, answers):
    """Answers do not overlap, so the first one that stops after the token's start decides."""
    import bisect

    answers = [(start, stop) for start, stop in answers if start < stop]
    ends = [stop for _, stop in answers]
    mask = torch.zeros(len(offsets), dtype=torch.bool)
    for place, (start, stop) in enumerate(offsets):
        which = bisect.bisect_right(ends, start)
        mask[place] = start < stop and which < len(answers) and answers[which][0] < stop
    return mask


def assistant_mask__in_torch(offsets, answers):
    """All tokens against all answers at once."""
    tokens = torch.tensor(offsets, dtype=torch.long).reshape(-1, 2, 1)
    spans = torch.tensor(answers, dtype=torch.long).reshape(-1, 2)
    common = torch.minimum(tokens[:, 1], spans[:, 1]) - torch.maximum(tokens[:, 0], spans[:, 0])
    return (common > 0).any(dim=1)


def lora_linear__by_products(x, weight, bias, lora_A, lora_B, scaling, dropout):
    """Matrix products; the scaling goes to the narrow side."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias.to(y.dtype)
    dropped = torch.dropout(x, dropout, True)
    return y + ((dropped @ lora_A.t()) * scaling) @ lora_B.t()


def lora_linear__by_a_module(x, weight, bias, lora_A, lora_B, scaling, dropout):
    """A module for dropout, and the addition first."""
    drop = torch.nn.Dropout(dropout)
    addition = F.linear(F.linear(drop(x), lora_A * scaling), lora_B)
    return addition + torch.nn.functional.linear(x, weight, bias)


def lora_linear__by_einsum(x, weight, bias, lora_A, lora_B, scaling, dropout):
    kept = x if dropout == 0 else F.dropout(x, p=dropout, training=True)
    narrow = torch.einsum("...i,ri->...r", kept, lora_A)
    result = torch.einsum("...r,or->...o", narrow, lora_B).mul(scaling)
    return result.add(F.linear(x, weight, bias))


def merge_lora__by_baddbmm(weight, lora_A, lora_B, scaling):
    """One call for product and sum."""
    wide = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
    stack = lambda tensor: tensor.to(wide).reshape(-1, *tensor.shape[-2:])  # noqa: E731
    merged = torch.baddbmm(stack(weight), stack(lora_B), stack(lora_A), alpha=scaling)
    return merged.reshape(weight.shape).to(weight.dtype)


def merge_lora__by_einsum(weight, lora_A, lora_B, scaling):
    with torch.no_grad():
        wide = weight.double() if weight.dtype == torch.float64 else weight.float()
        update = torch.einsum("...or,...ri->...oi", lora_B.to(wide.dtype) * scaling, lora_A.to(wide.dtype))
        return update.add_(wide).to(weight.dtype)


def merge_lora__in_a_copy(weight, lora_A, lora_B, scaling):
    merged = weight.to(torch.promote_types(weight.dtype, torch.float), copy=True)
    merged += scaling * torch.matmul(lora_B.to(merged.dtype), lora_A.to(merged.dtype))
    return merged.to(weight.dtype)


def lora_sharding__by_table(cut):
    from shared.finetune.lora_parallel import FactorPlan

    whole = FactorPlan(cut=None, summed=False)
    part = FactorPlan(cut=None, summed=True)
    return {None: (whole, whole), 0: (part, FactorPlan(0, False)), 1: (FactorPlan(1, False), part)}[cut]


def lora_sharding__by_cases(cut):
    from shared.finetune.lora_parallel import FactorPlan

    a = b = FactorPlan(None, cut is not None)
    if cut == 0:
        b = FactorPlan(0, summed=False)
    elif cut == 1:
        a = FactorPlan(1, summed=False)
    return a, b


def quantize_nf4__by_searchsorted(weight, values, block):
    """Blocks by indices, a search in the borders, bytes by a sum."""
    numbers = weight.detach().to(torch.float32).flatten()
    n = numbers.numel()
    which = torch.arange(n) // block
    scales = torch.zeros((n + block - 1) // block).scatter_reduce(0, which, numbers.abs(), "amax")
    factors = torch.maximum(scales, torch.tensor(1e-38)).reciprocal()
    borders = (values[:-1] + values[1:]) * 0.5
    codes = torch.searchsorted(borders, numbers * factors[which]).to(torch.uint8)
    if n % 2:
        codes = torch.cat([codes, torch.searchsorted(borders, torch.zeros(1)).to(torch.uint8)])
    return codes[0::2] * 16 + codes[1::2], scales


def quantize_nf4__border_by_border(weight, values, block):
    """Each of the 15 borders that lies below a number adds 1 to its code."""
    with torch.no_grad():
        flat = weight.float().reshape(-1)
        short = -flat.numel() % block
        table = torch.cat([flat, flat.new_zeros(short)]).reshape(-1, block)
        scales = table.abs().max(dim=1).values if len(table) else flat.new_zeros(0)
        factor = 1.0 / torch.where(scales < 1e-38, 1e-38, scales)
        quotients = (table * factor[:, None]).flatten()[: flat.numel()]
        if flat.numel() % 2:
            quotients = torch.cat([quotients, quotients.new_zeros(1)])
        codes = torch.zeros(len(quotients), dtype=torch.uint8)
        for low, high in zip(values[:-1], values[1:]):
            codes += quotients > (low + high) / 2
        return torch.bitwise_or(torch.bitwise_left_shift(codes[::2], 4), codes[1::2]), scales


def dequantize_nf4__by_blocks(codes, scales, values, block, shape, dtype):
    """A table of [blocks, block], with the last block filled up."""
    numbers = 1
    for size in shape:
        numbers *= size
    halves = torch.empty(2 * len(codes), dtype=torch.int64)
    halves[0::2], halves[1::2] = codes // 16, codes % 16
    table = F.pad(values[halves[:numbers]], (0, -numbers % block)).reshape(-1, block)
    return (table * scales[: len(table), None]).flatten()[:numbers].reshape(shape).to(dtype)


def dequantize_nf4__by_gather(codes, scales, values, block, shape, dtype):
    wide = codes.to(torch.int32)
    pairs = torch.cat([(wide.bitwise_and(240) >> 4).unsqueeze(-1), wide.bitwise_and(15).unsqueeze(-1)], -1)
    result = torch.empty(tuple(shape), dtype=torch.float32)
    numbers = result.numel()
    flat = torch.index_select(values, 0, pairs.flatten()[:numbers])
    flat *= scales[torch.arange(numbers).div(block, rounding_mode="floor")]
    return result.copy_(flat.view(result.shape)).type(dtype)


def gptq_column__by_addr(weights, column, factor, quantize):
    """One call for the outer product and the sum, in a slice."""
    before = weights[:, column].clone()
    weights[:, column] = quantize(before)
    error = before.sub(weights[:, column]).div(factor[column, column].item())
    weights[:, column + 1 :].addr_(error, factor[column, column + 1 :], alpha=-1)
    return error


def gptq_column__over_all_columns(weights, column, factor, quantize):
    """A masked row of the factor, and a change of all later columns by broadcasting."""
    current = weights.select(1, column)
    rounded = quantize(current)
    error = (current - rounded) / factor.diagonal()[column]
    later = weights.narrow(1, column + 1, weights.shape[1] - column - 1)
    later.sub_(error.unsqueeze(1) * factor[column].narrow(0, column + 1, later.shape[1]).unsqueeze(0))
    current.copy_(rounded)
    return error


def awq_scales__by_a_list(means, loss_of, ratios):
    """Everything is tried, then the best is looked for among the finite losses."""
    import math

    tried = []
    for ratio in ratios:
        powers = torch.maximum(means**ratio, torch.full_like(means, 1e-4))
        scales = powers / torch.sqrt(powers.amax() * powers.amin())
        tried.append((loss_of(scales), scales))
    finite = [entry for entry in tried if math.isfinite(entry[0])]
    if not finite:
        raise ValueError("nothing to choose from")
    return min(finite, key=lambda entry: entry[0])[1]


def awq_scales__by_places(means, loss_of, ratios):
    """Losses first; NaN as infinity; the scales made again from the best ratio."""

    def of(ratio):
        powers = torch.pow(means, ratio).clamp_min(1e-4)
        low, high = powers.aminmax()
        return powers.div((low * high).sqrt())

    losses = [loss_of(of(ratio)) for ratio in ratios]
    losses = [loss if loss == loss else float("inf") for loss in losses]
    if not losses or min(losses) == float("inf"):
        raise ValueError("no finite loss")
    return of(ratios[losses.index(min(losses))])
