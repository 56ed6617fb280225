"""GRPO against oracles: a policy over 3 tokens whose answers are enumerated, for expected gradients; what a rollout's numbers become."""

import math
from dataclasses import replace

import pytest
import torch
from test_ppo import ANSWERS, LENGTH, PROMPT, REWARDS, exact_log_probs, gradient_of, policy_of
from torch import Tensor

from shared.course.errors import CourseError
from shared.preference.rollout import Rollout, Sample, minibatch
from shared.preference.sampler import Completion
from shared.trainer.modes.grpo import alarms
from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective

COUNT = len(ANSWERS)
SIZES = {"prompts": 1, "answers": COUNT, "new_tokens": LENGTH, "passes": 1, "minibatches": 1}


def rollout_of(policy, reference) -> Rollout:
    """Each answer that can be given, once: in a sample it would come as often as it is likely."""
    lengths = torch.tensor([len(ids) for ids in ANSWERS])
    with torch.no_grad():
        said, by_reference = exact_log_probs(policy), exact_log_probs(reference)
    samples = [Sample(0, PROMPT, Completion(ids, [0.0] * len(ids), True)) for ids in ANSWERS]
    scores = torch.tensor(REWARDS, dtype=torch.float64)
    ended = torch.tensor([ids[-1] == 0 for ids in ANSWERS])
    return Rollout(samples, COUNT, scores, lengths, ended, said, said, by_reference, torch.zeros_like(said))


def found_gradient(config: GRPOConfig, rollout: Rollout, policy) -> dict[str, Tensor]:
    """The expected gradient of the loss of a step, over answers that the rollout's policy draws."""
    columns = {"old_log_probs": rollout.log_probs} | GRPOAdvantages(config)(rollout)[0]
    columns["weights"] = columns["weights"] * rollout.log_probs.sum(1).exp()[:, None]
    batch = minibatch(rollout.samples, columns, list(range(COUNT)), 8, 4)
    return gradient_of(policy, GRPOObjective(config)(policy, batch).loss_sum)


def require_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def prefixes_kl(policy, reference, old) -> Tensor:
    """The divergence of each token's distribution, after prefixes that `old` draws, held fixed."""
    now, there, weight = exact_log_probs(policy), exact_log_probs(reference).detach(), exact_log_probs(old).detach()
    total = now.new_zeros(())
    for place in range(LENGTH):
        beginnings = {tuple(ids[: place + 1]): row for row, ids in enumerate(ANSWERS) if len(ids) > place}
        for row in beginnings.values():
            before = weight[row, :place].sum().exp()
            total = total + before * now[row, place].exp() * (now[row, place] - there[row, place])
    return total


@pytest.fixture
def models():
    return policy_of(1), policy_of(5).requires_grad_(False)


def constant(**more) -> GRPOConfig:
    """Sums over tokens, each 1 / LENGTH, and rewards less their mean: nothing but a baseline stands between it and REINFORCE."""
    return GRPOConfig(**SIZES, aggregation="constant", scale="none", **more)


def test_the_expected_gradient_of_dr_grpo_is_that_of_the_mean_reward(models):
    policy, reference = models
    now = exact_log_probs(policy).sum(1).exp()
    wanted = gradient_of(policy, -(now * torch.tensor(REWARDS, dtype=torch.float64)).sum() / LENGTH)
    require_close(found_gradient(constant(), rollout_of(policy, reference), policy), wanted)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_other_aggregations_weigh_answers_by_their_length(models, aggregation):
    """Exact, and not the gradient of the mean reward, which Liu et al. 2025 point out of `sequence`."""
    policy, reference = models
    rollout, now = rollout_of(policy, reference), exact_log_probs(policy)
    advantages = rollout.scores - rollout.scores.mean()
    lengths = rollout.lengths if aggregation == "sequence" else rollout.lengths.double().mean()
    wanted = gradient_of(policy, -(now.sum(1).exp().detach() * advantages / lengths * now.sum(1)).sum())
    config = replace(constant(), aggregation=aggregation)
    require_close(found_gradient(config, rollout, policy), wanted)


KL = {"kl_coefficient": 1.0}


def kl_alone(policy, reference, **settings) -> dict[str, Tensor]:
    rollout = rollout_of(policy, reference)
    rollout.scores = torch.zeros_like(rollout.scores)
    return found_gradient(constant(**KL, **settings), rollout, policy)


def norm(gradient: dict[str, Tensor]) -> float:
    return math.sqrt(sum(value.square().sum().item() for value in gradient.values()))


def test_k1_in_the_loss_has_an_expected_gradient_of_0(models):
    right = gradient_of(models[0], prefixes_kl(*models, models[0]))
    assert norm(kl_alone(*models, kl_estimator="k1")) < 1e-12 < 1e-3 < norm(right)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_estimator_times_the_ratio_has_the_gradient_of_each_tokens_divergence(models, estimator):
    right = gradient_of(models[0], prefixes_kl(*models, models[0]) / LENGTH)
    require_close(kl_alone(*models, kl_estimator=estimator, kl_times_ratio=True), right)


def test_k3_in_the_loss_is_biased_and_k2_is_not(models):
    right = gradient_of(models[0], prefixes_kl(*models, models[0]) / LENGTH)
    require_close(kl_alone(*models, kl_estimator="k2"), right)
    biased = kl_alone(*models, kl_estimator="k3")
    assert norm({name: value - right[name] for name, value in biased.items()}) > 0.05 * norm(right)


def test_k1_in_the_reward_has_the_gradient_of_the_divergence_of_whole_answers(models):
    policy, reference = models
    now = exact_log_probs(policy).sum(1)
    wanted = gradient_of(policy, (now.exp() * (now - exact_log_probs(reference).sum(1).detach())).sum() / LENGTH)
    require_close(kl_alone(policy, reference, kl_in="reward", kl_estimator="k1"), wanted)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_after_an_update_the_gradient_is_that_of_the_clipped_objective(models, level):
    old, reference = models
    policy, rollout = policy_of(1), rollout_of(old, reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.2)
    now, lengths = exact_log_probs(policy), rollout.lengths[:, None]
    moved = now - rollout.log_probs
    ratio = (moved if level == "token" else moved.sum(1, keepdim=True) / lengths).exp().expand_as(moved)
    advantages = (rollout.scores - rollout.scores.mean())[:, None].where(rollout.mask, 0)
    held = ((ratio > 1.04) & (advantages > 0)) | ((ratio < 0.97) & (advantages < 0))
    assert 0 < held[rollout.mask].double().mean() < 1
    drawn = rollout.log_probs.sum(1).exp()[:, None]
    wanted = gradient_of(policy, -(drawn * ratio * advantages * ~held).sum() / LENGTH)
    require_close(found_gradient(constant(level=level, clip_low=0.03, clip_high=0.04), rollout, policy), wanted)


@pytest.mark.parametrize("limit", [1e6, 1.1])
def test_answers_of_another_policy_are_weighed_up_to_the_limit(models, limit):
    """Drawn by the second model and scored by the first: each token's gradient times its probability there over that here."""
    policy, sampler = models
    rollout = rollout_of(policy, policy_of(5))
    rollout.sampled = exact_log_probs(sampler).detach()
    with pytest.raises(CourseError, match="it draws from another distribution"):
        GRPOAdvantages(constant())(rollout)
    weights = (rollout.log_probs - rollout.sampled).exp().clamp(max=limit).where(rollout.mask, 0)
    found = GRPOAdvantages(constant(importance_limit=limit))(rollout)[0]["advantages"]
    torch.testing.assert_close(found, weights * (rollout.scores - rollout.scores.mean())[:, None])


# What a rollout's numbers become.


def some_rollout(prompts: int = 3, group: int = 4) -> Rollout:
    generator, count = torch.Generator().manual_seed(3), prompts * group
    lengths = torch.randint(1, 7, (count,), generator=generator)
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    log_probs = -torch.rand(inside.shape, generator=generator, dtype=torch.float64).where(inside, 0)
    samples = [Sample(number // group, [1], Completion([1] * int(n), [0.0], True)) for number, n in enumerate(lengths)]
    ended = torch.rand(count, generator=generator) < 0.6
    scores = torch.randint(0, 2, (count,), generator=generator).double()
    return Rollout(samples, group, scores, lengths, ended, log_probs, log_probs, log_probs - 0.1 * inside, 0 * log_probs)


def permuted(rollout: Rollout, order: Tensor) -> Rollout:
    changed = {name: value[order] for name, value in vars(rollout).items() if isinstance(value, Tensor)}
    return replace(rollout, samples=[rollout.samples[number] for number in order], **changed)


@pytest.mark.parametrize(
    "more", [{}, {"aggregation": "sequence", "scale": "batch", **KL, "kl_in": "reward"}, {"mask_truncated": True, **KL}]
)
def test_permuting_prompts_and_answers_within_a_group_permutes_what_is_learned(more):
    config, rollout = GRPOConfig(prompts=3, answers=4, new_tokens=6, minibatches=1, **more), some_rollout()
    order = torch.tensor([6, 7, 5, 4, 0, 3, 2, 1, 8, 10, 9, 11])
    one, other = (GRPOAdvantages(config)(each)[0] for each in (rollout, permuted(rollout, order)))
    for name in one:
        torch.testing.assert_close(other[name], one[name][order], rtol=1e-12, atol=1e-15)


def test_a_step_without_anything_to_learn_has_a_loss_and_a_gradient_of_0(models):
    rollout = rollout_of(*models)
    rollout.ended = torch.zeros(COUNT, dtype=torch.bool)
    found = found_gradient(GRPOConfig(**SIZES, mask_truncated=True), rollout, models[0])
    assert all(value.eq(0).all() for value in found.values())


def test_an_overlong_answer_loses_more_with_each_token():
    config = GRPOConfig(prompts=3, answers=4, new_tokens=6, minibatches=1, overlong_tokens=4, overlong_penalty=2.0)
    rollout = some_rollout()
    lost = rollout.scores - GRPOAdvantages(config).rewards(rollout)
    assert lost.tolist() == [max(0, length - 2) / 4 * 2.0 for length in rollout.lengths.tolist()]
    assert lost.max() == 2.0 and lost.min() == 0.0


def test_the_metrics_of_a_rollout_say_what_is_learned_from_it():
    rollout = some_rollout()
    rollout.scores[4:8] = 0.3
    groups = rollout.scores.reshape(3, 4)
    metrics = GRPOAdvantages(GRPOConfig(prompts=3, answers=4, new_tokens=6, minibatches=1))(rollout)[1]
    assert metrics["zero_variance"] == pytest.approx(sum(len(set(group)) == 1 for group in groups.tolist()) / 3)
    assert metrics["entropy"] == pytest.approx(-rollout.log_probs.sum().item() / rollout.lengths.sum().item())
    assert metrics["sampler_ratio"] == 1
    assert not alarms(metrics | {"ended": 0.6}) and alarms({"zero_variance": 0.95, "entropy": 0.001, "ended": 0.1}).keys() == {
        "zero_variance", "entropy", "ended",
    }  # fmt: skip


def test_answers_that_are_noise_are_blamed_on_temperature_and_beside_greedy_ones():
    noise = {"reward": 0.0, "entropy": 4.41, "zero_variance": 1.0, "ended": 0.1}
    assert alarms(noise, 1.3, 0.8)["noise"] == (
        "No answer earned a reward, and the entropy is 4.4 nats a token at grpo.temperature 1.3: answers are drawn almost at random. "
        "Greedily, the first model answers 80% of the held-out tasks right. Lower grpo.temperature, to 1 or less, first."
    )
    assert [*alarms(noise, 1.3)] == ["noise", "zero_variance", "ended"] and "Greedily" not in alarms(noise, 1.3)["noise"]
    assert alarms(noise, 1.0)["noise"].endswith("Lower grpo.temperature, or fine-tune first.")
    for change in ({"entropy": 0.9}, {"reward": 0.1}):
        assert "noise" not in alarms(noise | change, 1.3), "tasks that are too hard, or answers of which some are right"


WRONG = [
    ({"answers": 1}, "answers is 1"),
    ({"clip_low": 1.5}, "clip_low is 1.5"),
    ({"clip_high": math.inf}, "clip_high is inf"),
    ({"kl_coefficient": math.nan}, "kl_coefficient is nan"),
    ({"kl_times_ratio": True, "kl_in": "reward"}, "kl_times_ratio is for kl_in loss"),
    ({"overlong_tokens": 99, "overlong_penalty": 1.0}, "overlong_tokens is 99 of new_tokens 64"),
    ({"overlong_tokens": 9}, "belong together"),
    ({"rounds": 0}, "rounds is 0"),
    ({"importance_limit": 0.9}, "importance_limit is 0.9"),
    ({"top_p": 0.8}, "top_k, top_p, min_p or repetition_penalty changes the distribution"),
    ({"top_k": 4}, "give importance_limit"),
    ({"min_p": 0.1}, "give importance_limit"),
    ({"repetition_penalty": 1.2}, "give importance_limit"),
    ({"min_p": 1.5, "importance_limit": 2.0}, "min_p is 1.5"),
    ({"rows": 0}, "rows is 0"),
]


@pytest.mark.parametrize(("settings", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        GRPOConfig(**settings)
