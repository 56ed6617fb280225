"""The sentences of chapter 11's contracts, one by one, on tensors that hypothesis makes up; oracles are scipy's filter and TRL's loss."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import scipy.signal
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.preference.bradley_terry import bradley_terry_loss
from shared.preference.dpo import dpo_loss
from shared.preference.gae import generalized_advantages
from shared.preference.log_probs import sequence_log_probs
from shared.preference.ppo import ppo_policy_loss

often = settings(max_examples=40)
SEEDS = st.integers(0, 10**6)
PAIRS = st.integers(0, 6)
KINDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
SCALES = st.sampled_from([0.1, 1.0, 30.0, 3000.0])


def randn(*shape: int, seed: int, scale: float = 1.0, dtype=torch.float64) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def gradients(output: Tensor, *inputs: Tensor, flow: Tensor | None = None) -> list[Tensor]:
    flow = torch.ones_like(output) if flow is None else flow
    return list(torch.autograd.grad(output, inputs, flow, allow_unused=True, materialize_grads=True))


# Bradley-Terry


@often
@given(pairs=PAIRS, seed=SEEDS, kind=KINDS, margins=KINDS, scale=SCALES, centering=st.sampled_from([0.0, 0.01, 1.0]))
def test_a_reward_loss_is_finite_has_a_pair_each_and_leaves_its_inputs_as_they_are(pairs, seed, kind, margins, scale, centering):
    chosen, rejected = (randn(pairs, seed=seed + place, scale=scale, dtype=kind).requires_grad_() for place in range(2))
    margin = randn(pairs, seed=seed + 2, dtype=margins)
    before = [tensor.detach().clone() for tensor in (chosen, rejected, margin)]
    found = bradley_terry_loss(chosen, rejected, margin, centering)
    assert found.shape == (pairs,) and found.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert found.isfinite().all() and all(each.isfinite().all() for each in gradients(found, chosen, rejected))
    assert all(torch.equal(was, now) for was, now in zip(before, (chosen, rejected, margin), strict=True))
    for pair in range(pairs):
        alone = bradley_terry_loss(chosen[pair : pair + 1], rejected[pair : pair + 1], margin[pair : pair + 1], centering)
        torch.testing.assert_close(alone[0], found[pair], rtol=1e-6, atol=0.0)


@often
@given(seed=SEEDS, margin=st.floats(-5, 5), drift=st.floats(-100, 100), centering=st.floats(0, 1))
def test_a_reward_loss_is_the_surprise_at_the_preference_and_centering_looks_at_the_sum(seed, margin, drift, centering):
    chosen, rejected = randn(5, seed=seed), randn(5, seed=seed + 1)
    margins = torch.full_like(chosen, margin)
    found, turned = bradley_terry_loss(chosen, rejected, margins), bradley_terry_loss(rejected, chosen, -margins)
    torch.testing.assert_close((-found).exp() + (-turned).exp(), torch.ones(5).double())  # one of the two is preferred
    drifted = bradley_terry_loss(chosen + drift, rejected + drift, margins)
    torch.testing.assert_close(drifted, found, rtol=1e-9, atol=1e-11)
    centered = bradley_terry_loss(chosen, rejected, margins, centering) - found
    torch.testing.assert_close(centered, centering * (chosen + rejected) ** 2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected + margins), found)  # a margin is a reward of the rejected one's


# Sequence log-probabilities


@st.composite
def packed(draw) -> dict:
    rows, seq, count = draw(st.integers(0, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    whole = torch.Generator().manual_seed(draw(SEEDS))
    documents = torch.randint(-1, count, (rows, seq), generator=whole)
    counted = (torch.rand(rows, seq, generator=whole) < 0.6) & (documents >= 0)
    logs = -torch.rand(rows, seq, generator=whole, dtype=torch.float64) * 9
    odd = torch.tensor([math.nan, math.inf, -math.inf]).double()[torch.randint(3, (rows, seq), generator=whole)]
    return {"token_log_probs": logs.where(counted, odd).to(draw(KINDS)), "counted": counted, "documents": documents, "count": count}


@often
@given(batch=packed())
def test_a_sequences_log_probability_is_the_sum_of_what_counts_and_of_nothing_else(batch):
    logs = batch["token_log_probs"].requires_grad_()
    before = logs.detach().clone()
    found = sequence_log_probs(**batch)
    wide = torch.float64 if logs.dtype == torch.float64 else torch.float32
    assert found.dtype == wide and found.shape == (len(logs), batch["count"])
    assert torch.equal(before.nan_to_num(nan=7.0), logs.detach().nan_to_num(nan=7.0))
    for row in range(len(logs)):
        for number in range(batch["count"]):
            own = (batch["documents"][row] == number) & batch["counted"][row]
            expected = math.fsum(before[row][own].tolist())
            assert found[row, number].item() == pytest.approx(expected, rel=1e-12 if wide == torch.float64 else 1e-6)
            assert own.any() or found[row, number] == 0
    flow = randn(*found.shape, seed=3, dtype=wide)
    [back] = gradients(found, logs, flow=flow)
    assert (back[~batch["counted"]] == 0).all()
    at = batch["counted"].nonzero(as_tuple=True)
    torch.testing.assert_close(back[at], flow[at[0], batch["documents"][at]].to(back.dtype), rtol=0, atol=0)


@often
@given(batch=packed(), seed=SEEDS)
def test_an_impossible_token_makes_its_sequence_impossible_and_no_other(batch, seed):
    places = batch["counted"].nonzero().tolist()
    if not places:
        return
    row, column = places[seed % len(places)]
    before = sequence_log_probs(**batch)
    batch["token_log_probs"][row, column] = -math.inf
    after, number = sequence_log_probs(**batch), batch["documents"][row, column]
    assert after[row, number] == -math.inf
    after[row, number] = before[row, number] = 0
    assert torch.equal(after, before)


# DPO


@often
@given(pairs=PAIRS, seed=SEEDS, scale=SCALES, kind=st.sampled_from([torch.float32, torch.float64]), beta=st.floats(0.01, 2),
       label_smoothing=st.floats(0, 0.49))
def test_a_dpo_loss_is_finite_flows_to_the_policy_alone_and_has_a_pair_each(pairs, seed, scale, kind, beta, label_smoothing):
    four = [(randn(pairs, seed=seed + place, scale=scale) - 9 * scale).to(kind).requires_grad_() for place in range(4)]
    found = dpo_loss(*four, beta, label_smoothing)
    assert found.shape == (pairs,) and found.dtype == kind and found.isfinite().all() and (found >= 0).all()
    chosen, rejected, *reference = gradients(found, *four)
    assert chosen.isfinite().all() and all((each == 0).all() for each in reference)
    torch.testing.assert_close(chosen, -rejected)  # what one gains the other loses
    for pair in range(pairs):
        alone = dpo_loss(*(each[pair : pair + 1] for each in four), beta, label_smoothing)
        torch.testing.assert_close(alone[0], found[pair], rtol=1e-6, atol=1e-9)


@often
@given(seed=SEEDS, beta=st.floats(0.01, 2), label_smoothing=st.floats(0, 0.49), prompt=st.floats(-50, 50))
def test_dpo_is_the_reward_models_loss_on_implicit_rewards_and_the_prompt_cancels(seed, beta, label_smoothing, prompt):
    chosen, rejected, reference_chosen, reference_rejected = four = [randn(5, seed=seed + place, scale=4.0) for place in range(4)]
    rewards = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
    mixed = (1 - label_smoothing) * bradley_terry_loss(*rewards) + label_smoothing * bradley_terry_loss(*rewards[::-1])
    torch.testing.assert_close(dpo_loss(*four, beta, label_smoothing), mixed, rtol=1e-10, atol=1e-12)
    moved = dpo_loss(chosen + prompt, rejected + prompt, reference_chosen - prompt, reference_rejected - prompt, beta)
    torch.testing.assert_close(moved, dpo_loss(*four, beta), rtol=1e-9, atol=1e-11)
    at_rest = dpo_loss(chosen, rejected, chosen, rejected, beta, label_smoothing)
    torch.testing.assert_close(at_rest, torch.full_like(chosen, math.log(2)), rtol=1e-12, atol=0.0)


# Generalized advantages


@st.composite
def answers(draw) -> dict:
    time = draw(st.integers(0, 7))
    lengths = torch.tensor(draw(st.lists(st.integers(0, time), max_size=5)), dtype=torch.int64)
    seed, behind = draw(SEEDS), draw(st.sampled_from([0.0, 9.0, math.nan, -math.inf]))
    inside = torch.arange(time) < lengths.unsqueeze(1)
    rewards, values = (randn(len(lengths), time, seed=seed + place).where(inside, behind) for place in range(2))
    factors = st.sampled_from([0.0, 0.3, 0.9, 1.0])
    return {"rewards": rewards, "values": values, "lengths": lengths, "last_values": randn(len(lengths), seed=seed + 2),
            "gamma": draw(factors), "lam": draw(factors)}  # fmt: skip


@often
@given(batch=answers())
def test_advantages_are_scipys_filter_of_the_differences_turned_round(batch):
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
    found = generalized_advantages(**batch)
    assert found.shape == batch["values"].shape and found.dtype == batch["values"].dtype
    for row, length in enumerate(batch["lengths"].tolist()):
        assert (found[row, length:] == 0).all()
        states = torch.cat([batch["values"][row, :length], batch["last_values"][row : row + 1]])
        delta = (batch["rewards"][row, :length] + batch["gamma"] * states[1:] - states[:-1]).numpy()
        if length:
            filtered = scipy.signal.lfilter([1.0], [1.0, -batch["gamma"] * batch["lam"]], delta[::-1])[::-1].copy()
            torch.testing.assert_close(found[row, :length], torch.from_numpy(filtered), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value.nan_to_num(), batch[name].nan_to_num()) for name, value in before.items())


@often
@given(batch=answers(), data=st.data())
def test_what_stands_behind_an_end_or_in_another_answer_does_not_matter(batch, data):
    found = generalized_advantages(**batch)
    inside = torch.arange(batch["values"].shape[1]) < batch["lengths"].unsqueeze(1)
    other = {name: batch[name].where(inside, data.draw(st.floats(allow_nan=True))) for name in ("rewards", "values")}
    assert torch.equal(generalized_advantages(**batch | other), found)
    for row in range(len(found)):
        alone = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in batch.items()}
        assert torch.equal(generalized_advantages(**alone)[0], found[row])


@often
@given(batch=answers())
def test_advantages_carry_no_gradient_and_lam_1_compares_with_what_came(batch):
    leaves = {name: batch[name].requires_grad_() for name in ("rewards", "values", "last_values")}
    assert not generalized_advantages(**batch | leaves).requires_grad
    found = generalized_advantages(**batch | {"lam": 1.0})
    for row, length in enumerate(batch["lengths"].tolist()):
        for t in range(length):
            came = sum(batch["gamma"] ** (k - t) * batch["rewards"][row, k].item() for k in range(t, length))
            came += batch["gamma"] ** (length - t) * batch["last_values"][row].item()
            assert found[row, t].item() == pytest.approx(came - batch["values"][row, t].item(), abs=1e-10)


# PPO


@often
@given(seed=SEEDS, shape=st.lists(st.integers(0, 3), max_size=3), clip=st.floats(0, 1.5),
       kind=st.sampled_from([torch.float32, torch.float64]))
def test_a_ppo_loss_keeps_the_shape_and_flows_to_the_new_log_probabilities_alone(seed, shape, clip, kind):
    three = [randn(*shape, seed=seed + place, scale=0.5, dtype=kind).requires_grad_() for place in range(3)]
    found = ppo_policy_loss(*three, clip)
    assert found.shape == torch.Size(shape) and found.dtype == kind and found.isfinite().all()
    new, old, advantages = gradients(found, *three)
    assert (old == 0).all() and (advantages == 0).all()
    ratio, a = (three[0] - three[1]).exp().detach(), three[2].detach()
    gained = ((ratio > 1 + clip) & (a > 0)) | ((ratio < 1 - clip) & (a < 0))
    assert (new[gained] == 0).all()
    torch.testing.assert_close(new[~gained], (-ratio * a)[~gained])
    edge = ratio.clamp(1 - clip, 1 + clip)
    torch.testing.assert_close(found.detach()[gained], (-edge * a)[gained])
    torch.testing.assert_close(found.detach()[~gained], (-ratio * a)[~gained])
    assert (found.detach() >= -ratio * a - 1e-6).all(), "clipping takes away gains and forgives no loss"


def trl_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """TRL's GRPO trainer has PPO's clipped loss inside; `bnpo` is its mean over tokens, and the KL's weight is 0 here."""
    import trl

    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x)
    accelerator.reduce = lambda x, reduction="sum": x
    model = torch.nn.Linear(1, 1).train()
    trainer = SimpleNamespace(
        model=model, loss_type="bnpo", importance_sampling_level="token", beta=0.0, epsilon_low=clip, epsilon_high=clip,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
        vllm_importance_sampling_correction=False, max_completion_length=16, current_gradient_accumulation_steps=1,
        accelerator=accelerator, _metrics={"train": defaultdict(list)}, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    rows, tokens = log_probs.shape
    ids, mask = torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, tokens)
    batch = {"prompt_ids": ids, "prompt_mask": ids + 1, "completion_ids": torch.zeros(rows, tokens, dtype=torch.int64),
             "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old, "num_items_in_batch": mask.sum()}  # fmt: skip
    return trl.GRPOTrainer._compute_loss(trainer, model, batch)


@pytest.mark.parametrize("clip", [0.05, 0.2, 0.9])
def test_ppos_clipped_loss_is_trls(clip):
    new, old, advantages = (randn(5, 7, seed=place, scale=0.6) for place in range(3))
    leaf, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    mine = ppo_policy_loss(leaf, old, advantages, clip).mean()
    said = trl_loss(theirs, old, advantages, clip)
    torch.testing.assert_close(mine, said, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients(mine, leaf)[0], gradients(said, theirs)[0], rtol=1e-12, atol=1e-14)
