"""Rollouts as a loader: a killed run continues with the same answers and weights, on any ranks; bad rewards and prompts are named."""

import json
from dataclasses import replace

import pytest
import torch
from lora_runs import layout_of
from ppo_runs import NEW_TOKENS, PPO, PROMPTS, SEQ, STOPS, PPORun, on_ranks, reward, scripted

from shared.course.errors import CourseError
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.loss import IGNORED
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import CommunicationError, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.preference.rollout import AnswerRows, Sample
from shared.preference.rewards import reward_of_texts
from shared.preference.rollouts import RolloutLoader, RolloutMetrics
from shared.preference.sampler import Completion, PlainSampler

SAMPLES = [
    Sample(0, [1, 2, 3], Completion([4, 5, 6], [0.0] * 3, True)),
    Sample(1, [7], Completion([8], [0.0], False)),
    Sample(0, [1, 2, 3], Completion([9, 10], [0.0] * 2, False)),
    Sample(2, [11, 12], Completion([13, 14, 15, 16, 17], [0.0] * 5, True)),
]


def alone_run(**settings) -> PPORun:
    return PPORun(SingleRankCommunicator(), ParallelConfig(), **settings)


def test_answers_in_rows_are_where_they_are_said_to_be():
    rows = AnswerRows(SAMPLES, seq=10, multiple=4)
    assert rows.batch["input_ids"].shape == (4, 10)
    column = torch.tensor([[1.0, 2, 3, 99, 99], [4, 99, 99, 99, 99], [5, 6, 99, 99, 99], [7, 8, 9, 10, 11]])
    put = rows.put(column)
    for (row, start), length, sample, values in zip(rows.places.tolist(), rows.lengths.tolist(), SAMPLES, column, strict=True):
        here = slice(start, start + length)
        assert rows.batch["targets"][row, here].tolist() == sample.completion.ids
        assert rows.batch["input_ids"][row, start] == sample.prompt_ids[-1]
        assert rows.batch["positions"][row, start] == len(sample.prompt_ids) - 1
        assert put[row, here].tolist() == values[:length].tolist()
    counted = rows.batch["targets"] != IGNORED
    assert counted.sum() == rows.lengths.sum() and put[~counted].eq(0).all()
    assert torch.equal(rows.take(put), column.where(column < 99, 0))


def test_each_pass_trains_on_each_answer_once_in_another_order():
    ppo = replace(PPO, minibatches=4, passes=2)
    loader = alone_run(ppo=ppo, sampler=scripted).loader
    seen = []
    for _, microbatches in zip(range(8), loader, strict=False):
        seen.append([targets[targets != IGNORED].tolist() for batch in microbatches for targets in batch["targets"]])
    first, second = (sorted(token for step in part for row in step for token in row) for part in (seen[:4], seen[4:]))
    assert first == second and len(first) > 0 and seen[:4] != seen[4:]
    assert loader.position == 8 and loader.current is None


def test_prompts_come_once_an_epoch_in_another_order_each_time():
    loader = alone_run(sampler=scripted).loader
    order = [loader.prompt_at(place) for place in range(22)]
    assert sorted(order[:11]) == sorted(order[11:]) == list(range(11)) and order[:11] != order[11:]


def test_a_group_holds_answers_to_one_prompt():
    loader = alone_run(ppo=replace(PPO, prompts=4, answers=2)).loader
    samples = loader.roll_out().samples
    assert [each.prompt for each in samples[::2]] == [each.prompt for each in samples[1::2]]
    assert [each.completion.ids for each in samples[::2]] != [each.completion.ids for each in samples[1::2]]


def test_prompts_answers_and_minibatches_depend_on_the_seed_and_differ_from_rollout_to_rollout():
    loader = alone_run(ppo=replace(PPO, minibatches=4), sampler=scripted).loader
    opened = loader.roll_out()

    def drawn(seed: int, position: int) -> list:
        loader.seed, loader.position = seed, position
        order = [loader.prompt_at(place) for place in range(11)]
        return [[each.completion.ids for each in loader.own_answers()], loader.minibatch(opened)[0]["input_ids"].tolist(), order]

    first, later, other = drawn(3, 0), drawn(3, 11), drawn(4, 0)  # `later` is an epoch later
    assert first == drawn(3, 0)
    assert all(one != another for one, another in zip(first, other, strict=True))
    assert all(one != another for one, another in zip(first[:2], later[:2], strict=True))


def test_answers_are_drawn_without_dropout_and_without_gradients_and_the_model_is_left_as_it_was():
    loader = alone_run(ppo=PPO).loader
    model, plain = loader.strategy.model, loader.sampler
    seen = []

    def watching(model, *given):
        seen.append((model.training, torch.is_grad_enabled()))
        return plain(model, *given)

    loader.sampler = watching
    for training in (True, False):
        model.train(training)
        loader.roll_out()
        assert model.training == training and torch.is_grad_enabled()
    assert seen == [(False, False)] * 2


def engine_of(folder, steps: int, reward=reward) -> tuple[RuntimeEngine, PPORun]:
    run = alone_run(ppo=replace(PPO, minibatches=2, target_kl=1.0, kl_horizon=20))
    run.loader.reward = reward
    config = EngineConfig(output=folder, device="cpu", trackers=(), checkpoint=CheckpointConfig(asynchronous=False), log_every=1)
    kept = []

    class Keep(RolloutMetrics):
        def on_log(self, engine, metrics):
            kept.append({name: value for name, value in metrics.items() if name.startswith("rollout/")})

    engine = RuntimeEngine(run.parallel, run.optimizer, config, objective=run.objective, updater=run.update, callbacks=[Keep(run.loader)])
    engine.fit(run.loader, steps=steps)
    run.kept = kept
    return engine, run


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_that_was_stopped_continues_bit_for_bit(tmp_path, stop):
    _, whole = engine_of(tmp_path / "whole", 6)
    engine_of(tmp_path / "stopped", stop)
    _, resumed = engine_of(tmp_path / "stopped", 6)
    assert whole.kept[stop:] == resumed.kept and {"rollout/reward", "rollout/kl_coefficient"} <= whole.kept[0].keys()
    for (name, one), (_, other) in zip(whole.plain.named_parameters(), resumed.plain.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_reward_that_fails_between_two_checkpoints_loses_no_step(tmp_path):
    calls = []

    def failing_once(samples):
        calls.append(samples)
        if len(calls) == 2:
            raise KeyError("answer")
        return reward(samples)

    with pytest.raises(CourseError, match="The reward failing_once failed on answers"):
        engine_of(tmp_path / "failed", 6, failing_once)
    _, resumed = engine_of(tmp_path / "failed", 6, failing_once)
    _, whole = engine_of(tmp_path / "whole", 6)
    assert resumed.kept == whole.kept[PPO.passes * 2 :] and len(calls) == 3
    for (name, one), (_, other) in zip(whole.plain.named_parameters(), resumed.plain.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_rollout_continues_on_other_ranks():
    one = alone_run(sampler=scripted).train(1)
    state = json.loads(json.dumps(one.loader.state_dict()))
    wanted = next(one.source)

    def rest(world):
        run = PPORun(world, layout_of("dp2"), sampler=scripted)
        run.loader.load_state_dict(state)
        return next(iter(run.loader))

    parts = run_threads(rest, 2)
    for name in wanted[0]:
        rows = torch.cat([batch[name] for part in parts for batch in part])
        expected = torch.cat([batch[name] for batch in wanted])
        assert torch.equal(rows[: len(expected)], expected)


def test_another_seed_or_other_prompts_are_not_continued():
    loader = alone_run(sampler=scripted).loader
    state = loader.state_dict()
    loader.seed = 4
    with pytest.raises(CourseError, match="its seed was 3, here it is 4"):
        loader.load_state_dict(state)
    loader.seed, loader.prompts = 3, PROMPTS[:-1]
    with pytest.raises(CourseError, match="its prompts was"):
        loader.load_state_dict(state)


def test_with_other_sizes_the_next_step_begins_another_rollout():
    """Half of the open one would be cut into other minibatches than its steps so far."""
    first = alone_run(sampler=scripted).loader
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    for changed, is_open in ((PPO, True), (replace(PPO, minibatches=2), False), (replace(PPO, prompts=4), False)):
        loader = alone_run(sampler=scripted).loader
        loader.config = changed
        loader.load_state_dict(state)
        assert (loader.current is not None) == is_open and loader.position == PPO.prompts
        next(iter(loader))
        assert loader.position == PPO.prompts + (0 if is_open else changed.prompts)


def test_ranks_that_do_not_wait_for_one_another_are_noticed(monkeypatch):
    monkeypatch.setattr(RolloutLoader, "anyone", lambda self, is_open: is_open)
    with pytest.raises(CommunicationError):
        on_ranks("dp2_ep2", "experts")


def make_loader(**changed) -> RolloutLoader:
    run = alone_run(sampler=scripted)
    for name, value in changed.items():
        setattr(run.loader, name, value)
    return run.loader


def failing(samples):
    raise KeyError("answer")


REWARDS = [
    (failing, r"The reward failing failed on answers to the prompts from \d+ on: KeyError: 'answer'"),
    (lambda samples: [float("nan")] * len(samples), r"gave nan for an answer to prompt \d+: a finite number is needed"),
    (lambda samples: [1.0], "gave 1 numbers for 8 answers"),
    (lambda samples: [None] * len(samples), "gave None for an answer: PPO learns a value from each"),
]


@pytest.mark.parametrize(("wrong", "sentence"), REWARDS, ids=["raises", "nan", "too few", "none"])
def test_a_reward_that_fails_ends_the_run_by_name(wrong, sentence):
    with pytest.raises(CourseError, match=sentence):
        make_loader(reward=wrong).roll_out()


def test_a_reward_that_fails_on_one_rank_ends_all():
    def work(world):
        run = PPORun(world, layout_of("dp2"), sampler=scripted)
        run.loader.reward = failing if world.rank else reward
        with pytest.raises(CourseError, match="The reward failing failed") as caught:
            run.loader.roll_out()
        return str(caught.value)

    assert len(set(run_threads(work, 2))) == 1


def test_a_reward_of_texts_gets_the_answer_without_its_end_and_names_the_text_that_fails():
    def brief(prompt: str, answer: str) -> float:
        return 1 / (len(answer) - 1) + prompt.count("?")

    found = reward_of_texts(brief, ["a?", "b", "c"], lambda ids: "x" * len(ids))(SAMPLES[:1] + SAMPLES[2:])
    assert found == [1 + 1, 1 + 1, 1 / 3]
    with pytest.raises(CourseError, match="The reward brief failed on the prompt 'b' and the answer 'x': ZeroDivisionError"):
        reward_of_texts(brief, ["a?", "b", "c"], lambda ids: "x" * len(ids))(SAMPLES)


BAD = [
    ([], "There are no prompts"),
    ([[1], []], "Prompt 1 is empty"),
    ([[1], [1] * 12], "Prompt 1 has 12 tokens, which with new_tokens 6 do not fit into a row of 16"),
]


@pytest.mark.parametrize(("prompts", "sentence"), BAD)
def test_prompts_that_cannot_be_answered_are_refused(prompts, sentence):
    run = alone_run(sampler=scripted)
    arguments = {"sampler": scripted, "reward": reward, "config": PPO, "advantages": run.loader.advantages, "micro_batch_size": 2}
    with pytest.raises(CourseError, match=sentence):
        RolloutLoader(run.parallel, prompts, seq=SEQ, **arguments)


def test_the_sampler_and_the_trainer_agree_within_a_run():
    run = alone_run(sampler=PlainSampler(NEW_TOKENS, STOPS, PPO.temperature)).train(3)
    assert max(metrics["sampler_difference"] for metrics in run.seen) < 1e-12
    assert run.seen[0]["kl_to_reference"] != 0


def in_bfloat16(world, word: str) -> PPORun:
    """A run as the trainer makes it for precision bfloat16: weights in float32, and products under autocast."""
    run = PPORun(world, layout_of(word), dtype=torch.float32, computed_in=torch.bfloat16)
    run.loader.computed_in, run.objective = torch.bfloat16, autocast_objective(run.objective, "bfloat16")
    return run.train(2)


@pytest.mark.parametrize("word", ["one", "fsdp2"])
def test_answers_are_drawn_and_scored_in_the_precision_of_the_training(word):
    work = lambda world: in_bfloat16(world, word)
    for run in [work(SingleRankCommunicator())] if word == "one" else run_threads(work, 2):
        assert run.seen[0]["sampler_difference"] < 0.05
        assert run.first["approximate_kl"] == 0 and run.first["clip_fraction"] == 0, "the policy that drew is the one that is trained"
        assert run.totals.mean_metrics()["approximate_kl"] > 0
