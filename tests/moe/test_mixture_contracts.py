"""The sentences of chapter 09's contracts, one by one, on tokens, experts and ranks that hypothesis makes up."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.moe.dispatch import combine, dispatch
from shared.moe.losses import balance_loss, z_loss
from shared.moe.parallel.all_to_all import exchange_rows
from shared.moe.parallel.groups import gradient_ranks
from shared.moe.router import top_k_routing
from shared.parallel.comm.threads import run_threads

often = settings(max_examples=40)
SEEDS = st.integers(0, 10**6)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def routings(draw) -> dict:
    """Arguments of top_k_routing; some scores are 0, and some tie."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    best = draw(st.integers(1, groups))
    scores = randn(draw(st.integers(1, 5)), groups * size, seed=draw(SEEDS)).sigmoid()
    if draw(st.booleans()):
        scores = (3 * scores).floor() / 3
    bias = randn(groups * size, seed=draw(SEEDS)) * draw(st.sampled_from([0.1, 10.0])) if draw(st.booleans()) else None
    return {
        "scores": scores, "k": draw(st.integers(1, best * size)), "normalize": draw(st.booleans()), "bias": bias, "groups": groups,
        "scaling": draw(st.sampled_from([1.0, 2.5])), "best_groups": best,
    }  # fmt: skip


@often
@given(arguments=routings())
def test_the_k_best_experts_of_the_best_groups_are_chosen_each_once_the_best_first(arguments):
    scores, bias, groups = arguments["scores"], arguments["bias"], arguments["groups"]
    _, experts = top_k_routing(**arguments)
    biased = scores if bias is None else scores + bias
    assert experts.dtype == torch.int64 and experts.shape == (len(scores), arguments["k"])
    for token, chosen in zip(biased, experts.tolist(), strict=True):
        size = len(token) // groups
        worth = [sum(sorted(token[group * size : (group + 1) * size].tolist())[-2:]) for group in range(groups)]
        opened = {expert // size for expert in chosen}
        assert len({*chosen}) == len(chosen) and len(opened) <= arguments["best_groups"]
        limit = sorted(worth)[-arguments["best_groups"]]
        assert all(worth[group] >= limit - 1e-12 for group in opened)
        taken = [token[expert].item() for expert in chosen]
        assert taken == sorted(taken, reverse=True)
        if limit not in [w for place, w in enumerate(worth) if worth.index(w) != place]:  # no tie decides which groups are open
            others = [token[e].item() for e in range(len(token)) if worth[e // size] >= limit and e not in chosen]
            assert not others or max(others) <= taken[-1]


@often
@given(arguments=routings(), seed=SEEDS)
def test_weights_are_the_scores_of_the_chosen_and_the_bias_changes_no_digit_and_has_no_gradient(arguments, seed):
    scores = arguments["scores"].requires_grad_()
    if arguments["bias"] is not None:
        arguments["bias"].requires_grad_()
    weights, experts = top_k_routing(**arguments)
    own, scaling = scores.gather(-1, experts), arguments["scaling"]
    total = own.sum(-1, keepdim=True)
    if not arguments["normalize"]:
        assert torch.equal(weights, own * scaling)
    else:
        added = weights.sum(-1)
        assert torch.equal(added == 0, total[:, 0] == 0) and ((added == 0) | ((added - scaling).abs() < 1e-12)).all()
        torch.testing.assert_close(weights * total, own * scaling, rtol=1e-12, atol=0)
    flow = randn(*weights.shape, seed=seed)
    expected = own if not arguments["normalize"] else own / total.where(total > 0, 1)
    inputs = [scores] if arguments["bias"] is None else [scores, arguments["bias"]]
    of_scores, *of_bias = torch.autograd.grad(weights, inputs, flow, allow_unused=True, retain_graph=True)
    torch.testing.assert_close(of_scores, torch.autograd.grad(expected * scaling, scores, flow)[0], rtol=1e-12, atol=1e-15)
    assert of_bias in ([], [None])


@st.composite
def balances(draw) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq, size = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(2, 6))
    probabilities = randn(batch, seq, size, seed=draw(SEEDS)).softmax(-1)
    experts = randn(batch, seq, size, seed=draw(SEEDS)).topk(draw(st.integers(1, size))).indices
    return probabilities, experts, randn(batch, seq, seed=draw(SEEDS)) > draw(st.sampled_from([-9.0, 0.0, 9.0]))


@often
@given(arguments=balances())
def test_the_balance_loss_is_n_times_the_sum_of_f_times_p_of_each_row_and_rows_add(arguments):
    probabilities, experts, valid = arguments
    total, rows = 0.0, []
    for own, chosen, mask in zip(probabilities, experts, valid, strict=True):
        n = int(mask.sum())
        if n:
            f = torch.tensor([(chosen[mask] == expert).sum().item() / n for expert in range(own.shape[-1])], dtype=torch.float64)
            total += n * (f * own[mask].mean(dim=0)).sum()
        rows.append(balance_loss(own[None], chosen[None], mask[None]))
    found = balance_loss(probabilities, experts, valid)
    torch.testing.assert_close(found, torch.as_tensor(total, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(sum(rows), found, rtol=1e-12, atol=1e-15)


@often
@given(arguments=balances(), spoiled=st.sampled_from([torch.nan, torch.inf, 1e300]))
def test_tokens_that_do_not_count_change_neither_loss_nor_any_gradient(arguments, spoiled):
    probabilities, experts, valid = arguments
    found = []
    for value in (0.0, spoiled):
        leaf = torch.where(valid.unsqueeze(-1), probabilities, value).requires_grad_()
        losses = balance_loss(leaf, experts, valid), z_loss(leaf, valid)
        found.append([*losses, *(torch.autograd.grad(loss, leaf)[0] for loss in losses)])
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other)
    assert not found[0][2][~valid].any() and not found[0][3][~valid].any()
    if valid.any():
        broken = probabilities.masked_fill(valid.unsqueeze(-1), torch.nan)
        assert balance_loss(broken, experts, valid).isnan() and z_loss(broken, valid).isnan()


@often
@given(tokens=st.integers(1, 4), size=st.integers(1, 5), k=st.integers(1, 5))
def test_where_all_is_balanced_each_token_costs_k_of_e(tokens, size, k):
    k, seq = min(k, size), tokens * size
    experts = ((torch.arange(seq).view(-1, 1) + torch.arange(k)) % size).unsqueeze(0)
    found = balance_loss(torch.full((1, seq, size), 1 / size, dtype=torch.float64), experts, torch.ones(1, seq, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor(seq * k / size, dtype=torch.float64))


@often
@given(arguments=balances(), cut=st.integers(0, 7))
def test_parts_of_shared_out_rows_add_up_to_the_loss_of_the_whole_rows(arguments, cut):
    cut = min(cut, arguments[0].shape[1])
    counts = [F.one_hot(arguments[1], arguments[0].shape[-1]).sum(2).where(arguments[2].unsqueeze(-1), 0).sum(1).double()]
    called = []

    def over_row(own: Tensor) -> Tensor:
        called.append(own)
        return counts[0]

    parts = zip(*(tensor.tensor_split([cut], dim=1) for tensor in arguments), strict=True)
    found = sum(balance_loss(*part, over_row) for part in parts)
    torch.testing.assert_close(found, balance_loss(*arguments), rtol=1e-12, atol=1e-15)
    assert len(called) == 2 and torch.equal(sum(called), counts[0])


@often
@given(batch=st.integers(1, 3), seq=st.integers(1, 5), size=st.integers(1, 6), scale=st.sampled_from([1.0, 300.0]), seed=SEEDS)
def test_the_z_loss_is_the_sum_over_valid_tokens_of_the_squared_logarithm(batch, seq, size, scale, seed):
    logits, valid = scale * randn(batch, seq, size, seed=seed), randn(batch, seq, seed=seed + 1) > 0
    expected = sum((float(token.max()) + float((token - token.max()).exp().sum().log())) ** 2 for token in logits[valid])
    assert z_loss(logits, valid).item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@st.composite
def choices(draw) -> tuple[Tensor, int]:
    size = draw(st.integers(1, 6))
    k = draw(st.integers(1, size))
    experts = randn(draw(st.integers(0, 9)), size, seed=draw(SEEDS)).topk(k).indices
    dropped = randn(*experts.shape, seed=draw(SEEDS)) > draw(st.sampled_from([0.5, 9.0]))
    return experts.masked_fill(dropped, size), size


@often
@given(arguments=choices())
def test_dispatch_orders_choices_by_expert_then_by_number_and_counts_what_is_not_dropped(arguments):
    experts, size = arguments
    order, counts = dispatch(experts, size)
    flat = experts.flatten().tolist()
    assert order.tolist() == [choice for _, choice in sorted(zip(flat, range(len(flat)), strict=True))]
    assert counts.tolist() == [flat.count(expert) for expert in range(size)]
    assert order.dtype == counts.dtype == torch.int64


@often
@given(arguments=choices(), width=st.integers(1, 3), seed=SEEDS)
def test_combine_brings_each_row_back_to_its_token_times_its_weight(arguments, width, seed):
    experts, size = arguments
    tokens, k = experts.shape
    order, counts = dispatch(experts, size)
    x, weights = randn(tokens, width, seed=seed), randn(tokens, k, seed=seed + 1).requires_grad_()
    place = torch.arange(len(order)).unsqueeze(-1)
    rows = torch.where(place < counts.sum(), x[order // k], 0).requires_grad_()
    kept = torch.where(experts < size, weights, 0).sum(dim=1, keepdim=True)
    found = combine(rows, order, weights)
    torch.testing.assert_close(found, x * kept, rtol=1e-12, atol=1e-14)
    upstream = randn(tokens, width, seed=seed + 2)
    of_rows, of_weights = torch.autograd.grad(found, [rows, weights], upstream)
    torch.testing.assert_close(of_rows, upstream[order // k] * weights.flatten()[order].unsqueeze(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(of_weights, ((x * upstream).sum(-1, keepdim=True) * (experts < size)).double(), rtol=1e-12, atol=1e-14)
    for narrow, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        mixed = combine(rows.to(narrow), order, weights.to(wide))
        assert mixed.dtype == narrow
        exact = (rows.to(narrow).to(wide)[order.argsort()].view(tokens, k, width) * weights.to(wide).unsqueeze(-1)).sum(dim=1)
        assert torch.equal(mixed, exact.to(narrow))


@settings(max_examples=25)
@given(data=st.data(), ranks=st.integers(1, 4), width=st.integers(1, 3))
def test_rows_arrive_in_the_order_of_the_ranks_and_each_gradient_at_the_rank_that_sent_the_row(data, ranks, width):
    lines = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    sent = [data.draw(lines) for _ in range(ranks)]
    rows = [randn(sum(line), width, seed=rank) for rank, line in enumerate(sent)]

    def work(world):
        leaf = rows[world.rank].clone().requires_grad_()
        leaving, arriving = sent[world.rank], [line[world.rank] for line in sent]
        found = exchange_rows(leaf, leaving, arriving, world)
        back = exchange_rows(found * (world.rank + 2), arriving, leaving, world)
        [gradient] = torch.autograd.grad(back, leaf, rows[world.rank] + 1)
        entries = [(entry.operation, entry.bytes) for entry in world.trace.entries]
        return found.detach(), back.detach(), gradient, entries

    for rank, (found, back, gradient, entries) in enumerate(run_threads(work, ranks)):
        assert torch.equal(found, torch.cat([own.split(line)[rank] for own, line in zip(rows, sent, strict=True)]))
        factors = torch.cat([torch.full((count, 1), to + 2.0, dtype=torch.float64) for to, count in enumerate(sent[rank])])
        assert torch.equal(back, rows[rank] * factors) and torch.equal(gradient, (rows[rank] + 1) * factors)
        here, there = (8 * width * count for count in (sum(sent[rank]), sum(line[rank] for line in sent)))
        if ranks > 1:
            assert entries == [("all_to_all", size) for size in (here, there, here, there)]


@often
@given(
    pipeline=st.integers(1, 2), copies=st.integers(1, 3), context=st.integers(1, 3), tensor=st.integers(1, 2), expert=st.integers(1, 4),
    each=st.integers(1, 2),
)  # fmt: skip
def test_every_gradient_is_the_sum_over_all_tokens_each_counted_once(pipeline, copies, context, tensor, expert, each):
    data = copies * expert
    table = gradient_ranks(pipeline, data, context, tensor, expert, expert * each)
    assert len(table) == pipeline * data * context * tensor
    for rank, line in enumerate(table):
        stage = rank // (data * context * tensor)
        tokens = [r for r in range(len(table)) if r // (data * context * tensor) == stage and r % tensor == rank % tensor]
        assert line.everything_else == tokens
        computed = [source for holder in line.same_experts for source in table[holder].exchange]
        assert sorted(computed) == tokens, "each token's rows reach the expert once"
        assert all(table[holder].experts == line.experts for holder in line.same_experts)
        assert sorted(e for other in line.exchange for e in range(*table[other].experts)) == [*range(expert * each)]
        assert all(table[other].exchange == line.exchange for other in line.exchange)
        assert rank in line.exchange and rank in line.same_experts and line.same_experts == sorted(line.same_experts)
