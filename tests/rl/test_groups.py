"""Rollouts of groups: dynamic sampling that resumes, the first step's loss, and a sampler whose probabilities are the trainer's."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from grpo_runs import GRPO, SIZES, GRPORun
from ppo_runs import NEW_TOKENS, STOPS

from shared.course.errors import CourseError
from shared.loop import accumulate_gradients
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.rl.generation import CachedSampler
from shared.rl.grpo import GRPOConfig

PLAIN = GRPOConfig(**SIZES)


def run_of(grpo: GRPOConfig = PLAIN, world=None, **settings) -> GRPORun:
    world = world or SingleRankCommunicator()
    return GRPORun(world, ParallelConfig(data_parallel=world.size), grpo=grpo, **settings)


def rare(samples) -> list[float]:
    """1 for some answers: most groups have none, or only such."""
    return [float(sum(sample.completion.ids) % 3 == 0) for sample in samples]


def rolled(rounds: int, reward=rare) -> tuple[GRPORun, list, dict]:
    run = run_of(replace(PLAIN, rounds=rounds))
    run.loader.reward = reward
    opened = run.loader.roll_out()
    return run, opened.samples, opened.metrics


def test_groups_without_a_difference_are_drawn_again():
    _, once, metrics = rolled(1)
    assert 0 < metrics["zero_variance"] < 1 and metrics["rounds"] == 1
    run, samples, again = rolled(8)
    scores = torch.tensor(rare(samples)).reshape(-1, 2)
    assert (scores[:, 0] != scores[:, 1]).all() and len(samples) == len(once) == 8 and again["rounds"] > 1
    assert run.loader.position == 4 * (again["rounds"] - 1), "the loader adds the last round when it hands out the rollout"
    prompts = [run.loader.prompt_at(place) for place in range(4 * again["rounds"])]
    kept = [sample.prompt for sample in samples[::2]]
    places = iter(prompts)
    assert all(prompt in places for prompt in kept), "in the order of the prompts"
    assert [each.prompt for each in samples[::2]] == [each.prompt for each in samples[1::2]]
    first = [sample.completion.ids for sample in once]
    differ = [place for place in range(4) if rare(once)[2 * place] != rare(once)[2 * place + 1]]
    assert [each.completion.ids for each in samples[: 2 * len(differ)]] == [first[2 * place + part] for place in differ for part in (0, 1)]


def test_a_reward_that_fails_in_a_later_round_leaves_the_position_of_the_first():
    calls = []

    def failing(samples):
        calls.append(samples)
        if len(calls) == 2:
            raise KeyError("answer")
        return rare(samples)

    run = run_of(replace(PLAIN, rounds=8))
    run.loader.reward = failing
    with pytest.raises(CourseError, match="The reward failing failed"):
        run.loader.roll_out()
    assert run.loader.position == 0 and len(calls) == 2


def test_where_no_group_ever_differs_the_rollout_is_full_all_the_same():
    run, samples, metrics = rolled(3, lambda samples: [1.0] * len(samples))
    assert len(samples) == 8 and metrics["rounds"] == 3 and metrics["zero_variance"] == 1.0
    totals = accumulate_gradients(run.parallel.model, next(run.source), run.objective)
    assert totals.loss_sum == 0 and all(not parameter.grad.any() for parameter in run.plain.parameters())


def test_a_rollout_that_was_drawn_again_continues_with_the_same_prompts_and_answers():
    config = replace(GRPO, rounds=4, passes=1, minibatches=2)

    def train(world, steps: int, state=None) -> GRPORun:
        run = run_of(config, world)
        run.loader.reward = rare
        if state:
            run.loader.load_state_dict(json.loads(json.dumps(state["loader"])))
            run.plain.load_state_dict(state["weights"])
            run.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        return run.train(steps)

    whole = train(SingleRankCommunicator(), 6)
    assert any(metrics["rounds"] > 1 for metrics in whole.seen)
    stopped = train(SingleRankCommunicator(), 3)
    state = {"loader": stopped.loader.state_dict(), "weights": stopped.plain.state_dict(), "optimizer": stopped.optimizer.state_dict()}
    resumed = train(SingleRankCommunicator(), 3, state)
    assert resumed.seen == whole.seen[3:] and resumed.answers == whole.answers[-len(resumed.answers) :]
    assert all(torch.equal(one, other) for one, other in zip(whole.plain.parameters(), resumed.plain.parameters(), strict=True))
    for resumed in run_threads(lambda world: train(world, 3, state), 2):
        assert resumed.answers == whole.answers[-len(resumed.answers) :]
        for one, other in zip(whole.plain.parameters(), resumed.plain.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_first_loss_is_0_and_its_gradient_is_not(aggregation):
    run = run_of(replace(PLAIN, aggregation=aggregation, answers=4, prompts=3))
    batches = next(run.source)
    totals = accumulate_gradients(run.parallel.model, batches, run.objective)
    norm = sum(parameter.grad.square().sum() for parameter in run.plain.parameters() if parameter.grad is not None).sqrt() / 12
    metrics = totals.mean_metrics()
    assert metrics["clip_fraction"] == 0 and abs(metrics["approximate_kl"]) < 1e-12 and norm > 1e-2
    by_length = sum((batch["advantages"] * batch["weights"]).sum() for batch in batches)
    assert totals.loss_sum.item() == pytest.approx(-by_length.item(), abs=1e-9)
    if aggregation == "sequence":
        assert abs(totals.loss_sum) < 1e-9


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_trainer_gives_answers_the_probabilities_that_they_were_drawn_with(temperature, dtype):
    run = run_of(replace(PLAIN, temperature=temperature), dtype=dtype, sampler=CachedSampler(NEW_TOKENS, STOPS, temperature))
    for _ in range(2):  # also after the weights have changed
        run.train(2)
        assert run.seen[-1]["sampler_ratio"] == pytest.approx(1, abs=1e-5) and run.seen[-1]["sampler_difference"] < 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.4}], ids=["top-p", "top-k", "min-p"])
def test_a_sampler_that_cuts_off_the_tail_is_refused_or_weighed(temperature, cut):
    """The trainer scores all tokens, and says of those that were kept together what was kept, not 1."""
    sampler = CachedSampler(NEW_TOKENS, STOPS, temperature, **cut)
    with pytest.raises(CourseError, match="it draws from another distribution, by its temperature, top_k, top_p or precision"):
        run_of(replace(PLAIN, temperature=temperature), sampler=sampler).loader.roll_out()
    config = replace(PLAIN, temperature=temperature, importance_limit=5.0, prompts=8, **cut)
    assert CachedSampler(NEW_TOKENS, STOPS, **config.sampling) == sampler
    run = run_of(config, sampler=sampler)
    opened = run.loader.roll_out()
    assert 0.2 < opened.metrics["sampler_ratio"] < 0.97
    for sample, old, said in zip(opened.samples, opened.columns["old_log_probs"], opened.columns["advantages"], strict=True):
        drawn = torch.tensor(sample.completion.log_probs)
        assert (old[: len(drawn)] <= drawn + 1e-9).all(), "what was kept is renormalised: likelier under the sampler"
        weights = (old[: len(drawn)] - drawn).exp()
        torch.testing.assert_close(said[: len(drawn)] / weights, (said[0] / weights[0]).expand(len(drawn)))


def test_answers_that_a_repetition_penalty_drew_are_weighed():
    """Nothing is cut off, so the weights are 1 on average, and their limit takes little away."""
    config = replace(PLAIN, importance_limit=20.0, prompts=40, answers=8, repetition_penalty=1.5)
    metrics = run_of(config, sampler=CachedSampler(NEW_TOKENS, STOPS, **config.sampling)).loader.roll_out().metrics
    assert metrics["sampler_difference"] > 0.1 and metrics["sampler_ratio"] == pytest.approx(1, abs=0.1)


def test_a_sampler_at_another_temperature_is_refused():
    with pytest.raises(CourseError, match="it draws from another distribution"):
        run_of(PLAIN, sampler=CachedSampler(NEW_TOKENS, STOPS, 1.3)).loader.roll_out()


@pytest.mark.parametrize(
    "more", [{}, {"aggregation": "sequence", "level": "sequence", "mask_truncated": True}, {"aggregation": "constant"}]
)
def test_the_size_of_micro_batches_does_not_matter(more):
    found = []
    for rows in (1, 2, 5):
        run = run_of(replace(PLAIN, kl_coefficient=0.3, **more))
        run.loader.micro_batch_size = rows
        batches = next(run.source)
        totals = accumulate_gradients(run.parallel.model, batches, run.objective)
        found.append((len(batches), totals, {name: each.grad for name, each in run.plain.named_parameters()}))
    assert len({count for count, *_ in found}) > 1
    for _, totals, gradients in found[1:]:
        assert totals.token_count == found[0][1].token_count == 8
        assert totals.mean_metrics() == pytest.approx(found[0][1].mean_metrics(), rel=1e-9, abs=1e-12)
        torch.testing.assert_close(gradients, found[0][2], rtol=1e-9, atol=1e-12)
