"""A reward that returns None: left out of sums, means and deviations as TRL leaves it out, trained on in no step, and kept in checkpoints.

TRL's methods are called unbound, with a stand-in for its trainer. They are private, so TRL is pinned.
"""

import json
import random
from collections import defaultdict
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from grpo_runs import SIZES, GRPORun
from ppo_runs import PPORun

from shared.course.errors import CourseError
from shared.finetune.instructions import Task
from shared.loop import accumulate_gradients
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.preference.rollout import Rollout, Sample, scores_of
from shared.preference.sampler import Completion
from shared.rl.advantages import differing
from shared.rl.grpo import GRPOAdvantages, GRPOConfig
from shared.rl.rewards import RewardPart, RewardSet

TRL, GROUP, WEIGHTS = "1.16.0", 4, (1.0, -0.5)
TABLE = [
    (1.0, None), (0.0, 2.0), (None, None), (3.0, 1.0),  # one answer without a reward
    (None, None), (None, None), (None, None), (None, None),  # a group without any
    (None, None), (None, None), (0.5, None), (None, None),  # one answer alone
    (None, 1.0), (None, 1.0), (None, None), (-0.5, None),  # equal ones
    (1.0, 2.0), (2.0, 0.0), (0.0, 0.0), (1.0, 1.0),
]  # fmt: skip
draw = random.Random(0)
RANDOM = [tuple(draw.choice((None, draw.uniform(-3, 3))) for _ in WEIGHTS) for _ in range(10 * GROUP)]


class Accelerator:
    """A single process's."""

    num_processes, process_index, is_main_process, device = 1, 0, True, torch.device("cpu")

    def gather(self, value):
        return value


def said_by_trl(table, scale: str) -> tuple[torch.Tensor, dict]:
    """TRL's advantages and metrics, by its own code, from what two reward functions return for each answer."""
    import accelerate
    import trl

    assert trl.__version__ == TRL, "private methods are called: compare them again before another version is pinned"
    accelerate.PartialState(cpu=True)  # its loggers ask for one
    functions = [lambda column=column, **given: [row[column] for row in table] for column in range(len(WEIGHTS))]
    names = [f"reward_{column}" for column in range(len(WEIGHTS))]
    trainer = SimpleNamespace(
        accelerator=Accelerator(), model=SimpleNamespace(training=True, is_gradient_checkpointing=False), environment_factories=None,
        environments=None, tools=None, _tokenizer=SimpleNamespace(pad_token_id=0), pad_to_multiple_of=None,
        mask_truncated_completions=False, use_vllm=False, beta=0.0, num_iterations=1, state=SimpleNamespace(global_step=0),
        reward_funcs=functions, reward_func_names=names, reward_processing_classes=[None] * len(functions), _log_completion_extra=None,
        _log_metric=None, num_generations=GROUP, multi_objective_aggregation="sum_then_normalize", reward_weights=torch.tensor(WEIGHTS),
        scale_rewards=scale, _metrics={"train": defaultdict(list)}, _logs=defaultdict(list, rewards=defaultdict(list)),
        _pending_extra_logs={}, _pending_metrics={},
        args=SimpleNamespace(per_device_train_batch_size=len(table), gradient_accumulation_steps=1, steps_per_generation=1, report_to=[],
                             gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    trainer._generate = lambda prompts: ([[1]] * len(table), [[2]] * len(table), None, ["x"] * len(table), None, {}, None, None)
    trainer._calculate_rewards = lambda *given: trl.GRPOTrainer._calculate_rewards(trainer, *given)
    made = trl.GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(table))
    return made["advantages"], {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Of a table, the samples with their scores and parts, by functions of one's own in the process of rewards."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    written = [f"def reward_{column}(prompt, answer, expected): return TABLE[int(answer)][{column}]\n" for column in range(len(WEIGHTS))]
    file.write_text(f"TABLE = {[*TABLE, *RANDOM]!r}\n{''.join(written)}")
    parts = [RewardPart(f"{file}:reward_{column}", weight) for column, weight in enumerate(WEIGHTS)]
    with closing(RewardSet(parts, [Task("t", "p", "", "exact")], lambda ids: "".join(map(chr, ids)))) as rewards:

        def of(first: int, count: int) -> list[Sample]:
            answers = [[*map(ord, str(number))] for number in range(first, first + count)]
            samples = [Sample(0, [1], Completion([*ids, 0], [0.0] * (len(ids) + 1), True)) for ids in answers]
            scores = rewards(samples)
            judged = zip(samples, scores, rewards.parts, strict=True)
            return [each._replace(score=score, parts=part) for each, score, part in judged]

        yield {"written": of(0, len(TABLE)), "random": of(len(TABLE), len(RANDOM))}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("name", "table"), [("written", TABLE), ("random", RANDOM)], ids=["written", "random"])
def test_advantages_and_means_of_rewards_are_trls(judged, name, table, scale):
    samples, scores = judged[name], scores_of(judged[name], torch.float32)
    nothing, lengths = torch.zeros(len(table), 1), torch.ones(len(table), dtype=torch.int64)
    rollout = Rollout(samples, GROUP, scores, lengths, lengths > 0, nothing, nothing, nothing, nothing)
    config = GRPOConfig(prompts=len(table) // GROUP, answers=GROUP, scale=scale)
    columns, metrics = GRPOAdvantages(config)(rollout)
    wanted, theirs = said_by_trl(table, scale)
    torch.testing.assert_close(columns["advantages"][:, 0], wanted, rtol=1e-5, atol=1e-6)
    metrics |= rollout.metrics()
    assert metrics["reward"] == pytest.approx(theirs["reward"], rel=1e-6)
    for column in range(len(WEIGHTS)):
        assert metrics[f"reward/reward_{column}"] == pytest.approx(theirs[f"rewards/reward_{column}/mean"], rel=1e-6)
    assert metrics["without_reward"] == sum(row == (None, None) for row in table) / len(table) > 0
    assert not columns["advantages"][[number for number, row in enumerate(table) if row == (None, None)]].any()


def test_numbers_that_are_missing_make_no_group_varied():
    nan = float("nan")
    groups = [[1.0, nan, 1.0], [nan, 1.0, nan], [nan] * 3, [nan, 1.0, 0.0], [2.0] * 3, [1.0, 0.0, 0.0]]
    assert differing(torch.tensor(groups).flatten(), 3).tolist() == [False, False, False, True, False, True]


def some(samples) -> list[float | None]:
    """For prompts with an odd number alone, and of these not for all answers."""
    sums = [sum(sample.completion.ids) for sample in samples]
    return [float(total % 2) if sample.prompt % 2 and total % 5 else None for sample, total in zip(samples, sums, strict=True)]


def run_of(reward, world=None, **settings) -> GRPORun:
    world = world or SingleRankCommunicator()
    run = GRPORun(world, ParallelConfig(data_parallel=world.size), grpo=GRPOConfig(**SIZES | settings))
    run.loader.reward = reward
    return run


def test_a_rollout_without_any_reward_trains_nothing_and_says_so():
    run = run_of(lambda samples: [None] * len(samples))
    totals = accumulate_gradients(run.parallel.model, next(run.source), run.objective)
    assert totals.loss_sum == 0 and all(not parameter.grad.any() for parameter in run.plain.parameters())
    assert run.loader.metrics["without_reward"] == run.loader.metrics["zero_variance"] == 1 and "reward" not in run.loader.metrics


def test_groups_without_a_reward_are_drawn_again():
    opened = run_of(some, answers=4, rounds=8).loader.roll_out()
    assert opened.metrics["rounds"] > 1 and opened.metrics["zero_variance"] > 0
    assert all(sample.prompt % 2 for sample in opened.samples) and None in [sample.score for sample in opened.samples]
    assert opened.columns["advantages"].any()


def test_missing_rewards_are_null_in_a_checkpoint_and_in_what_ranks_exchange():
    run = run_of(some, answers=4)
    next(run.source)
    state = json.loads(json.dumps(run.loader.state_dict(), allow_nan=False))
    resumed = run_of(some, answers=4)
    resumed.loader.load_state_dict(state)
    assert None in [sample.score for sample in resumed.loader.current.samples]
    batches = zip(next(run.source), next(resumed.source), strict=True)
    assert all(torch.equal(one[name], other[name]) for one, other in batches for name in one)
    for shared in run_threads(lambda world: run_of(some, world, answers=4).loader.roll_out(), 2):
        assert [each.score for each in shared.samples] == [each[3] for each in state["current"]["samples"]]


def test_ppo_refuses_an_answer_without_a_reward():
    run = PPORun(SingleRankCommunicator(), ParallelConfig())
    run.loader.reward = some
    with pytest.raises(CourseError, match="The reward gave None for an answer: PPO learns a value from each,"):
        run.loader.roll_out()
