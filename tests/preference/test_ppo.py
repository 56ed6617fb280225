"""PPO against oracles: scipy's filter for GAE, an enumerated policy for the gradient, formulas written out for the rest.

The installed trl has no PPO any more, so the losses are compared with the papers' formulas (Schulman et al. 2017, equations 7 and 9; the
clipped value loss as in OpenAI's implementation), in numpy.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.rollout import Rollout, Sample, minibatch
from shared.preference.gae import generalized_advantages
from shared.preference.ppo import PPOAdvantages, PPOConfig, PPOObjective, clipped_value_loss, token_rewards, whitened
from shared.preference.rollouts import RolloutLoader
from shared.preference.sampler import Completion
from shared.preference.value_head import token_scores, with_value_head

CONFIG = ModelConfig(vocab_size=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, initializer_range=0.5)
PROMPT, LENGTH, END = [1, 2], 3, 0
PREFIXES = [ids for length in range(LENGTH) for ids in product((1, 2), repeat=length)]
ANSWERS = [[*ids, END] for ids in PREFIXES] + [list(ids) for ids in product((1, 2), repeat=LENGTH)]  # all 15 that can be given
REWARDS = [math.sin(3 * number) for number in range(len(ANSWERS))]


class Scripted(torch.nn.Module):
    """In place of a model: log-probabilities and values that are parameters; the values are 0 where none are given."""

    def __init__(self, log_probs: Tensor, values: Tensor | None = None):
        super().__init__()
        self.log_probs = torch.nn.Parameter(log_probs)
        self.values = torch.nn.Parameter(torch.zeros_like(log_probs) if values is None else values)

    def forward(self, input_ids: Tensor, **how) -> tuple[Tensor, Tensor]:
        return self.log_probs, self.values


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_has_a_finite_gradient(advantage):
    model, same = Scripted(torch.tensor([[-0.5, -1.0]])), torch.zeros(1, 2)
    batch = {name: same for name in ("returns", "old_values")} | {name: same.long() for name in ("input_ids", "documents", "positions")}
    batch |= {"targets": torch.ones(1, 2).long(), "old_log_probs": torch.tensor([[-120.0, -1.0]]), "advantages": same + advantage}
    totals = PPOObjective(PPOConfig())(model, batch)
    totals.loss_sum.backward()
    assert model.log_probs.grad.norm().isfinite() and all(value.isfinite() for value in totals.metrics.values())
    assert model.log_probs.grad[0, 1] == pytest.approx(-advantage)  # a token that has not moved learns as always


def test_the_loss_and_the_metrics_of_a_step_are_the_formulas():
    """Written out in numpy, with another clip for values than for ratios, and with anything at all where there is no target."""
    generator = np.random.default_rng(0)
    log_probs, old, advantages, values, old_values, returns = generator.normal(scale=0.4, size=(6, 5, 8))
    targets = np.where(generator.random((5, 8)) < 0.7, 1, -100)
    ratio, held = np.exp(log_probs - old), old_values + np.clip(values - old_values, -0.3, 0.3)
    policy = -np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    value = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)
    wanted = {
        "policy_loss": policy,
        "value_loss": value,
        "approximate_kl": ratio - 1 - np.log(ratio),
        "clip_fraction": (ratio < 0.9) | (ratio > 1.1),
        "entropy": -log_probs,
    }
    columns = {"old_log_probs": old, "advantages": advantages, "old_values": old_values, "returns": returns, "targets": targets}
    batch = {name: torch.from_numpy(column) for name, column in columns.items()}
    batch |= {name: torch.zeros(5, 8, dtype=torch.int64) for name in ("input_ids", "documents", "positions")}
    model = Scripted(torch.from_numpy(log_probs), torch.from_numpy(values))
    totals = PPOObjective(PPOConfig(clip=0.1, value_clip=0.3, value_coefficient=0.7))(model, batch)
    counted = targets == 1
    assert totals.token_count == counted.sum()
    assert totals.loss_sum.item() == pytest.approx((policy + 0.7 * value)[counted].sum(), rel=1e-12)
    assert {name: total.item() for name, total in totals.metrics.items()} == pytest.approx(
        {name: each[counted].sum() for name, each in wanted.items()}, rel=1e-9
    )


def policy_of(seed: int) -> TransformerModel:
    model = with_value_head(TransformerModel(CONFIG, seed=seed).double())
    model.head.value.weight.data.copy_(torch.linspace(-1, 1, 8))  # a baseline that is wrong everywhere
    return model


def exact_log_probs(model: TransformerModel, temperature: float = 1.0) -> Tensor:
    """[answers, LENGTH] from the logits of each answer by itself; 0 behind an end."""
    found = []
    for ids in ANSWERS:
        logits = model(torch.tensor([PROMPT + ids]))[0, len(PROMPT) - 1 : -1] / temperature
        found.append(F.pad(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)], (0, LENGTH - len(ids))))
    return torch.stack(found)


def all_answers(model, prompts, seeds, anyone) -> list[Completion]:
    return [Completion(ids, [0.0] * len(ids), ids[-1] == END) for ids in ANSWERS]


def rollout_of(policy: TransformerModel, reference: TransformerModel, config: PPOConfig) -> tuple[RolloutLoader, list]:
    strategy = apply_parallel(policy, Mesh(ParallelConfig(), SingleRankCommunicator()))
    loader = RolloutLoader(
        strategy, [PROMPT], sampler=all_answers, reward=lambda samples: REWARDS, config=config, advantages=PPOAdvantages(config), seq=8,
        micro_batch_size=4, reference=lambda batch: token_scores(reference, batch, config.temperature)[0],
    )  # fmt: skip
    return loader, loader.roll_out()


def gradient_of(model: TransformerModel, loss: Tensor) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if name != "head.value.weight"}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


SETTINGS = {"prompts": 1, "answers": len(ANSWERS), "new_tokens": LENGTH, "passes": 1, "minibatches": 1, "whiten": False}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kl", [0.0, 0.4])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_the_expected_gradient_is_that_of_the_enumerated_policy(temperature, kl, penalty):
    """Of the mean reward minus kl times the divergence from the reference, whatever the values are: with lam 1 they are a baseline."""
    policy, reference = policy_of(1), policy_of(5).requires_grad_(False)
    config = PPOConfig(**SETTINGS, lam=1.0, kl_coefficient=kl, value_coefficient=0.0, temperature=temperature, unended_penalty=penalty)
    _, opened = rollout_of(policy, reference, config)
    exact = exact_log_probs(policy, temperature).sum(1)
    assert exact.exp().sum().item() == pytest.approx(1, abs=1e-12), "the answers are all that can be given"
    rewards = torch.tensor(REWARDS, dtype=torch.float64) - penalty * torch.tensor([ids[-1] != END for ids in ANSWERS])
    divergence = (exact.exp() * (exact - exact_log_probs(reference, temperature).sum(1))).sum()
    wanted = gradient_of(policy, -(exact.exp() * rewards).sum() + kl * divergence)

    columns = dict(opened.columns)  # the rollout holds each answer once; in a sample it would come as often as it is likely
    columns["advantages"] = columns["advantages"] * exact.detach().exp()[:, None]
    batch = minibatch(opened.samples, columns, list(range(len(ANSWERS))), 8, 4)
    found = gradient_of(policy, PPOObjective(config)(policy, batch).loss_sum)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_after_an_update_the_loss_is_the_clipped_objective_of_the_enumerated_policy():
    old, policy = policy_of(1), policy_of(1)
    config = PPOConfig(**SETTINGS, lam=0.9, kl_coefficient=0.2, value_coefficient=0.0, clip=0.05)
    _, opened = rollout_of(old, policy_of(5).requires_grad_(False), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.2)
    before, now = exact_log_probs(old).detach(), exact_log_probs(policy)
    weights, ratio = before.sum(1).exp()[:, None], (now - before).exp()
    advantages = opened.columns["advantages"] * weights
    gains = np.minimum((ratio * advantages).detach().numpy(), (np.clip(ratio.detach().numpy(), 0.95, 1.05)) * advantages.numpy())
    batch = minibatch(opened.samples, {**opened.columns, "advantages": advantages}, list(range(len(ANSWERS))), 8, 4)
    totals = PPOObjective(config)(policy, batch)
    assert totals.loss_sum.item() == pytest.approx(-gains.sum(), rel=1e-9)
    assert 0 < totals.mean_metrics()["clip_fraction"] < 1
    inside = ((ratio > 0.95) & (ratio < 1.05)) | ((ratio >= 1.05) & (advantages < 0)) | ((ratio <= 0.95) & (advantages > 0))
    wanted = gradient_of(policy, -(ratio * advantages * inside).sum())
    for name, value in gradient_of(policy, totals.loss_sum).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def test_advantages_are_scipys_filter():
    from scipy.signal import lfilter

    generator, gamma, lam = torch.Generator().manual_seed(0), 0.97, 0.9
    lengths = torch.tensor([7, 1, 4, 6])
    rewards, values = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    after = torch.tensor([0.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    found = generalized_advantages(rewards, values, lengths, after, gamma, lam)
    for row, length in enumerate(lengths.tolist()):
        following = torch.cat([values[row, 1:length], after[row : row + 1]])
        delta = rewards[row, :length] + gamma * following - values[row, :length]
        wanted = lfilter([1], [1, -gamma * lam], delta.numpy()[::-1])[::-1]
        np.testing.assert_allclose(found[row, :length].numpy(), wanted, rtol=1e-12)
        assert found[row, length:].eq(0).all()


def some_rollout(answers: int = 6, time: int = 5) -> Rollout:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 1, 3, 4, 2, 5])
    inside = torch.arange(time) < lengths[:, None]
    numbers = [torch.randn(answers, time, generator=generator, dtype=torch.float64).where(inside, 0) for _ in range(4)]
    samples = [Sample(0, [1], Completion([1] * length, [0.0] * length, True)) for length in lengths.tolist()]
    scores = torch.randn(answers, generator=generator, dtype=torch.float64)
    return Rollout(samples, 2, scores, lengths, torch.tensor([True, True, False, True, True, False]), *numbers)


def test_the_metrics_of_a_rollout_are_means_over_answers():
    rollout = some_rollout()
    kl = [(rollout.log_probs - rollout.reference)[row, :length].sum().item() for row, length in enumerate([5, 1, 3, 4, 2, 5])]
    wanted = {"reward": rollout.scores.numpy().mean(), "reward_deviation": rollout.scores.numpy().std(), "kl_to_reference": np.mean(kl)}
    wanted |= {"answer_tokens": 20 / 6, "ended": 4 / 6, "sampler_difference": (rollout.log_probs - rollout.sampled).abs().max().item()}
    assert rollout.metrics() == pytest.approx(wanted, rel=1e-12)


def test_the_reward_of_a_token_is_its_kl_penalty_and_at_the_end_the_score():
    rollout = some_rollout()
    found = token_rewards(rollout, 0.1, unended_penalty=2.0)
    for row, length in enumerate(rollout.lengths.tolist()):
        wanted = -0.1 * (rollout.log_probs[row] - rollout.reference[row])[:length]
        wanted[-1] += rollout.scores[row] - (0.0 if rollout.ended[row] else 2.0)
        torch.testing.assert_close(found[row, :length], wanted)
        assert found[row, length:].eq(0).all()


def test_returns_are_advantages_before_whitening_and_values():
    rollout, config = some_rollout(), PPOConfig(prompts=6, kl_coefficient=0.1, lam=0.9)
    columns, metrics = PPOAdvantages(config)(rollout)
    rewards = token_rewards(rollout, 0.1)
    raw = generalized_advantages(rewards, rollout.values, rollout.lengths, torch.zeros(6, dtype=torch.float64), 1.0, 0.9)
    torch.testing.assert_close(columns["returns"], (raw + rollout.values).where(rollout.mask, 0))
    assert torch.equal(columns["old_values"], rollout.values)
    inside = columns["advantages"][rollout.mask].numpy()
    np.testing.assert_allclose([inside.mean(), inside.std(ddof=1)], [0, 1], atol=1e-7)
    order = raw[rollout.mask].argsort()
    assert torch.equal(columns["advantages"][rollout.mask].argsort(), order), "whitening keeps the order"
    assert columns["advantages"][~rollout.mask].eq(0).all()
    residual, returns = (columns["returns"] - rollout.values)[rollout.mask].numpy(), columns["returns"][rollout.mask].numpy()
    assert metrics["value_explains"] == pytest.approx(1 - residual.var() / returns.var())


def test_whitening_ignores_what_stands_behind_an_end():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.tensor([[1.0, 2.0, 1e30], [6.0, math.inf, math.nan]], dtype=torch.float64)
    inside = np.array([1.0, 2.0, 6.0])
    wanted = (inside - inside.mean()) / inside.std(ddof=1)
    np.testing.assert_allclose(whitened(values, mask)[mask].numpy(), wanted, rtol=1e-7)
    assert whitened(values, mask)[~mask].eq(0).all()


def test_equal_advantages_whiten_to_zero():
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert whitened(torch.full((2, 3), 5.0), mask).eq(0).all()


def test_the_value_loss_takes_the_larger_of_two_errors():
    generator = np.random.default_rng(0)
    values, old, returns = generator.normal(size=(3, 200))
    held = np.clip(values, old - 0.2, old + 0.2)
    wanted = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)
    found = clipped_value_loss(*(torch.from_numpy(each) for each in (values, old, returns)), 0.2)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_an_adaptive_coefficient_moves_towards_its_target():
    rollout = some_rollout()
    rollout.reference = rollout.log_probs - 0.5 / rollout.lengths[:, None] * rollout.mask  # 0.5 nats in each answer
    for target, factor in ((0.1, 1 + 0.2 * 6 / 60), (0.48, 1 + (0.5 / 0.48 - 1) * 6 / 60), (5.0, 1 - 0.2 * 6 / 60)):
        advantages = PPOAdvantages(PPOConfig(prompts=6, kl_coefficient=0.1, target_kl=target, kl_horizon=60))
        _, metrics = advantages(rollout)
        assert metrics["kl_coefficient"] == 0.1 and advantages.kl_coefficient == pytest.approx(0.1 * factor)
        again = PPOAdvantages(PPOConfig(prompts=6, kl_coefficient=0.1, target_kl=target, kl_horizon=60))
        again.load_state_dict(advantages.state_dict())
        assert again.kl_coefficient == advantages.kl_coefficient
        retuned = PPOAdvantages(PPOConfig(prompts=6, kl_coefficient=0.4, target_kl=target, kl_horizon=60))
        retuned.load_state_dict(advantages.state_dict())
        assert retuned.kl_coefficient == 0.4, "what a continued run is given takes the place of what was in effect"


WRONG = [
    ({"prompts": 0}, "prompts is 0"),
    ({"minibatches": 3}, "does not divide the 32 answers"),
    ({"temperature": 0.0}, "temperature is 0.0"),
    ({"clip": 0.0}, "clip is 0.0"),
    ({"lam": 1.5}, "lam is 1.5"),
    ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
    ({"kl_coefficient": 0.0, "target_kl": 6.0}, "target_kl would multiply it"),
    ({"target_kl": math.nan}, "target_kl is nan"),
]


@pytest.mark.parametrize(("settings", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        PPOConfig(**settings)
