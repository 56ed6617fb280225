"""The sentences of the contracts of GRPO's advantages, loss and KL estimates, one by one, on tensors that hypothesis makes up.

Oracles are numpy, scipy, chapter 11's loss and finite differences; `test_grpo_against_trl.py` compares the whole objective with TRL's.
"""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.preference.ppo import ppo_policy_loss
from shared.rl.advantages import group_advantages
from shared.rl.policy_loss import grpo_policy_loss, kl_estimate

often = settings(max_examples=40)
SEEDS = st.integers(0, 10**6)
KINDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
SCALES, LEVELS = st.sampled_from(["group", "batch", "none"]), st.sampled_from(["token", "sequence"])
ESTIMATORS = st.sampled_from(["k1", "k2", "k3"])
EXACT = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5, torch.float64: 1e-11}  # roundings of each dtype


def randn(*shape: int, seed: int, scale: float = 1.0, dtype=torch.float64) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


# Group-relative advantages


@often
@given(prompts=st.integers(0, 5), group=st.integers(1, 6), seed=SEEDS, kind=KINDS, scale=SCALES, size=st.sampled_from([1e-3, 1.0, 300.0]))
def test_advantages_are_numpys_deviations_and_leave_the_rewards_as_they_are(prompts, group, seed, kind, scale, size):
    rewards = randn(prompts * group, seed=seed, scale=size, dtype=kind)
    before = rewards.clone()
    found = group_advantages(rewards, group, scale)
    assert torch.equal(rewards, before) and found.dtype == kind and found.shape == rewards.shape
    groups = rewards.double().numpy().reshape(-1, group)
    expected = groups - groups.mean(axis=1, keepdims=True) if len(groups) else groups
    if scale != "none" and group > 1 and prompts:
        expected = expected / ((groups.std(axis=1, ddof=1, keepdims=True) if scale == "group" else groups.std(ddof=1)) + 1e-4)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected).flatten(), rtol=EXACT[kind], atol=EXACT[kind] * min(size, 1.0))
    for number in range(prompts if scale != "batch" else 0):
        own = slice(number * group, (number + 1) * group)
        torch.testing.assert_close(group_advantages(rewards[own], group, scale), found[own], rtol=1e-6, atol=0.0)


@often
@given(rewards=st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=5), group=st.integers(1, 9), kind=KINDS, scale=SCALES)
def test_equal_rewards_of_any_size_teach_exactly_nothing(rewards, group, kind, scale):
    repeated = (torch.tensor(rewards, dtype=torch.float64) / 10).to(kind).repeat_interleave(group)
    assert (group_advantages(repeated, group, scale) == 0).all()


@often
@given(seed=SEEDS, group=st.integers(2, 8), scale=SCALES, factor=st.floats(0.5, 20))
def test_advantages_of_a_group_add_up_to_0_are_z_scores_and_keep_the_order(seed, group, scale, factor):
    rewards = randn(3 * group, seed=seed, scale=factor)
    found = group_advantages(rewards, group, scale).view(3, group)
    torch.testing.assert_close(found.sum(1), torch.zeros(3).double(), rtol=0.0, atol=1e-10)
    assert torch.equal(found.argsort(1), rewards.view(3, group).argsort(1))
    if scale == "group":
        deviation = rewards.view(3, group).std(1, keepdim=True)
        z_scores = scipy.stats.zscore(rewards.view(3, group).numpy(), axis=1, ddof=1)
        torch.testing.assert_close(found * (deviation + 1e-4) / deviation, torch.from_numpy(z_scores), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("answers", "group", "scale"), [(5, 2, "group"), (2, 3, "none"), (4, 0, "group"), (4, -2, "batch"), (4, 2, "std")])
def test_what_is_no_group_and_no_scale_is_refused(answers, group, scale):
    with pytest.raises(ValueError, match="is "):
        group_advantages(torch.ones(answers), group, scale)


# GRPO's policy loss


@st.composite
def packed(draw, kinds=KINDS) -> dict:
    """Rows of tokens that belong to any of the row's answers, in any order; those of none hold what is no number."""
    rows, seq = draw(st.integers(0, 3)), draw(st.integers(0, 9))
    whole, seed, kind = torch.Generator().manual_seed(draw(SEEDS)), draw(SEEDS), draw(kinds)
    answers = torch.randint(-1, draw(st.integers(1, max(seq, 1))) if seq else 1, (rows, seq), generator=whole)
    old = -randn(rows, seq, seed=seed).abs()
    now, advantages = old + randn(rows, seq, seed=seed + 1, scale=0.4), randn(rows, seq, seed=seed + 2)
    made = {"log_probs": now, "old_log_probs": old, "advantages": advantages}
    odd = torch.tensor([math.nan, math.inf, -math.inf]).double()[torch.randint(3, (3, rows, seq), generator=whole)]
    made = {name: tensor.where(answers >= 0, left).to(kind) for (name, tensor), left in zip(made.items(), odd, strict=True)}
    return made | {"answers": answers, "clip_low": draw(st.floats(0.0, 1.2)), "clip_high": draw(st.floats(0.0, 1.2)), "level": draw(LEVELS)}


@often
@given(batch=packed())
def test_a_grpo_loss_is_ppos_with_the_ratio_of_the_token_or_of_its_answer(batch):
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
    leaves = {name: batch[name].requires_grad_() for name in ("log_probs", "old_log_probs", "advantages")}
    found, answers = grpo_policy_loss(**batch), batch["answers"]
    kind = batch["log_probs"].dtype
    assert found.shape == answers.shape and found.dtype == kind and (found[answers < 0] == 0).all()
    back, *others = torch.autograd.grad(found, [*leaves.values()], randn(*found.shape, seed=3, dtype=kind), materialize_grads=True)
    assert all((each == 0).all() for each in others) and (back[answers < 0] == 0).all() and back.isfinite().all()
    assert all(torch.equal(value.nan_to_num(), batch[name].detach().nan_to_num()) for name, value in before.items())
    now, old, advantages = (before[name].double() for name in leaves)
    for row, place in (answers >= 0).nonzero().tolist():
        own = answers[row] == answers[row, place] if batch["level"] == "sequence" else torch.arange(answers.shape[1]) == place
        ratio = math.exp(np.mean((now - old)[row, own].numpy()))
        edge = min(max(ratio, 1 - batch["clip_low"]), 1 + batch["clip_high"])
        a = advantages[row, place].item()
        assert found[row, place].item() == pytest.approx(max(-ratio * a, -edge * a), rel=EXACT[kind], abs=EXACT[kind] * 0.1)


@often
@given(batch=packed(st.just(torch.float64)), direction=SEEDS)
def test_the_gradient_of_a_grpo_loss_is_its_slope(batch, direction):
    """Central differences, with a step so small that no ratio crosses an edge."""
    counted, step = batch["answers"] >= 0, 1e-6
    leaf, way = batch["log_probs"].clone().requires_grad_(), randn(*counted.shape, seed=direction).where(counted, 0)
    flow = randn(*counted.shape, seed=direction + 1)
    high, low = (grpo_policy_loss(**batch | {"log_probs": batch["log_probs"] + sign * step * way}) for sign in (1, -1))
    [back] = torch.autograd.grad(grpo_policy_loss(**batch | {"log_probs": leaf}), [leaf], flow, materialize_grads=True)
    torch.testing.assert_close((back * way).sum(), ((high - low) / (2 * step) * flow).sum(), rtol=1e-5, atol=1e-7)


@often
@given(batch=packed(st.just(torch.float64)), seed=SEEDS, other=st.floats(allow_nan=True))
def test_the_order_of_tokens_the_numbers_of_answers_and_what_belongs_to_none_do_not_matter(batch, seed, other):
    found, answers = grpo_policy_loss(**batch), batch["answers"]
    numbers = ("log_probs", "old_log_probs", "advantages")
    seq, generator = answers.shape[1], torch.Generator().manual_seed(seed)
    assert torch.equal(grpo_policy_loss(**batch | {name: batch[name].where(answers >= 0, other) for name in numbers}), found)
    order, names = torch.randperm(seq, generator=generator), torch.cat([torch.randperm(seq, generator=generator), torch.tensor([-1])])
    turned = grpo_policy_loss(**batch | {name: batch[name][:, order] for name in (*numbers, "answers")})
    torch.testing.assert_close(turned, found[:, order], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grpo_policy_loss(**batch | {"answers": names[answers]}), found, rtol=1e-12, atol=1e-14)
    for row in range(len(answers)):
        alone = grpo_policy_loss(**batch | {name: batch[name][row : row + 1] for name in (*numbers, "answers")})
        torch.testing.assert_close(alone[0], found[row], rtol=1e-12, atol=1e-14)


@often
@given(seed=SEEDS, clip=st.floats(0, 1))
def test_answers_of_one_token_have_the_same_loss_at_both_levels_and_it_is_ppos(seed, clip):
    three = [randn(3, 5, seed=seed + place, scale=0.5) for place in range(3)]
    answers = torch.arange(5).expand(3, 5)
    expected = ppo_policy_loss(*three, clip)
    for level in ("token", "sequence"):
        torch.testing.assert_close(grpo_policy_loss(*three, answers, clip, clip, level), expected, rtol=1e-12, atol=0.0)


# KL estimates


@often
@given(shape=st.lists(st.integers(0, 3), max_size=3), seed=SEEDS, kind=KINDS, estimator=ESTIMATORS, size=st.sampled_from([1e-3, 0.1, 2.0]))
def test_a_kl_estimate_keeps_shape_and_dtype_and_flows_to_the_policy_alone(shape, seed, kind, estimator, size):
    log_probs = -randn(*shape, seed=seed, dtype=kind).abs()
    reference = (log_probs.double() + randn(*shape, seed=seed + 1, scale=size)).to(kind)
    before, leaves = [log_probs.clone(), reference.clone()], [log_probs.requires_grad_(), reference.requires_grad_()]
    found = kl_estimate(*leaves, estimator)
    assert found.shape == torch.Size(shape) and found.dtype == kind and (estimator == "k1" or (found >= 0).all())
    back, other = torch.autograd.grad(found, leaves, torch.ones_like(found), materialize_grads=True)
    d = before[1].double() - before[0].double()
    torch.testing.assert_close(back.double(), {"k1": d * 0 + 1, "k2": -d, "k3": -d.expm1()}[estimator], rtol=EXACT[kind], atol=EXACT[kind])
    assert (other == 0).all() and all(torch.equal(was, now.detach()) for was, now in zip(before, leaves, strict=True))


@often
@given(d=st.floats(2.0**-10, 0.5, width=32), sign=st.sampled_from([1, -1]))
def test_k3_is_right_where_the_log_ratio_is_small_and_never_negative(d, sign):
    """It is the sum of d^k / k! from k = 2."""
    exact = math.fsum((sign * d) ** k / math.factorial(k) for k in range(2, 20))
    found = kl_estimate(torch.zeros(()), torch.tensor(sign * d, dtype=torch.float32))
    assert found.item() == pytest.approx(exact, rel=1e-3)
    for tiny in torch.logspace(-12, -1, 45):
        assert kl_estimate(torch.zeros(()), sign * d * tiny) >= 0


@often
@given(seed=SEEDS, tokens=st.integers(2, 9))
def test_k1_and_k3_are_right_on_average_and_k2_has_the_right_gradient(seed, tokens):
    policy, reference = randn(tokens, seed=seed).requires_grad_(), randn(tokens, seed=seed + 1)
    logs, other = policy.log_softmax(0), reference.log_softmax(0)
    p, q = logs.detach().exp(), other.exp()
    exact = scipy.stats.entropy(p.numpy(), q.numpy())
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(logs.detach(), other, estimator)).sum().item() == pytest.approx(exact, rel=1e-9)
    [gradient] = torch.autograd.grad((p * kl_estimate(logs, other, "k2")).sum(), [policy])
    torch.testing.assert_close(gradient, p * ((p / q).log() - exact), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["", "k4", "K3", None])
def test_another_level_and_another_estimator_are_refused(name):
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="choose"):
        kl_estimate(one, one, name)
    with pytest.raises(ValueError, match="choose"):
        grpo_policy_loss(one, one, one, one.long(), level=name)
