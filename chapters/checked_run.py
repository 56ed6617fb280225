"""GRPO on small tasks: a model that is right now and then learns from a verifier alone. Chapter 12's run and study share this.

The model is fine-tuned on right answers until it gives them to a part of the held-out tasks, and no further; from there on it sees no
answer but its own, each with a reward of 1 or 0.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chapters.checked_tasks import Asked, CheckedTasks, reward_of, training_tasks


@dataclass
class CheckedConfig:
    """A start that solves a part of the tasks, and GRPO from there.

    Args:
        task: sums, counts or functions.
        digits: of each of a sum's two numbers, at most.
        start_accuracy: held-out share that the fine-tuned start answers right before it is left alone.
        start_drawn: whether that is the share of drawn answers, in place of the likeliest ones.
        start_rate: AdamW's learning rate of the fine-tuning, on batches of 128 tasks.
        most_start_steps: after which the fine-tuning gives up.
        steps: of GRPO; each rollout has `passes` of them.
        prompts, answers: of a rollout; answers to each prompt.
        passes: over the answers of a rollout.
        learning_rate: AdamW's, of GRPO.
        kl_coefficient: what moving away from the start costs.
        width, layers: of the model.
        seed: of weights, tasks and answers.
    """

    task: Literal["sums", "counts", "functions"] = "sums"
    digits: int = 3
    start_accuracy: float = 0.2
    start_drawn: bool = False
    start_rate: float = 0.001
    most_start_steps: int = 3000
    steps: int = 300
    prompts: int = 32
    answers: int = 8
    passes: int = 2
    learning_rate: float = 1e-4
    kl_coefficient: float = 0.0
    width: int = 128
    layers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("digits", "most_start_steps", "steps", "prompts", "passes", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")
        if self.answers < 2:
            raise ValueError(f"answers is {self.answers}: an answer is compared with others to its prompt, so give at least 2.")
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}: give 0 or more.")
        if self.width < 8 or self.width % 8:
            raise ValueError(f"width is {self.width}: give a multiple of 8, which four heads share.")
        if not 1 <= self.digits <= 6:
            raise ValueError(f"digits is {self.digits}: give 1 to 6.")
        if not 0 <= self.start_accuracy < 1:
            raise ValueError(f"start_accuracy is {self.start_accuracy}: give at least 0 and less than 1.")
        for name in ("start_rate", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")


@dataclass
class Curve:
    """What a run saw. rollouts: for each, its metrics. held_out: (steps done, share of held-out tasks answered right greedily)."""

    rollouts: list[dict[str, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


# The start.


def model_settings(config: CheckedConfig, tasks: CheckedTasks) -> dict[str, Any]:
    return {
        "vocab_size": tasks.vocab_size, "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": 4,
        "intermediate_size": 3 * config.width, "max_position_embeddings": tasks.positions, "initializer_range": 0.05,
    }  # fmt: skip


def demonstrations(tasks: CheckedTasks, drawn: Iterator[Asked], count: int) -> Iterator[list[Any]]:
    """Batches of `count` right answers, without end."""
    from shared.preference.rollout import AnswerRows, Sample
    from shared.preference.sampler import Completion

    while True:
        some = [next(drawn) for _ in range(count)]
        samples = [Sample(0, each.prompt, Completion([*each.answer, tasks.end], [], True)) for each in some]
        yield [AnswerRows(samples, 3 * tasks.longest, 1).batch]


def start_of(config: CheckedConfig, tasks: CheckedTasks, say: Callable[[str], None]) -> Any:
    """A model that has learned from right answers until it gives `start_accuracy` of the held-out ones.

    Raises:
        CourseError: it did not get there.
    """
    from shared.course.errors import CourseError
    from shared.loop import train
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig
    from shared.optim.updater import Update

    model = TransformerModel(ModelConfig(**model_settings(config, tasks)), seed=config.seed)
    data, found = demonstrations(tasks, tasks.others(), 128), 0.0
    optimizer = build_optimizer(model, OptimizerConfig("adamw", lr=config.start_rate))
    for step, _ in train(model, optimizer, data, packed_next_token_objective, steps=config.most_start_steps, updater=Update(1.0)):
        if step % 20 == 0:
            found = drawn_accuracy(model, tasks, config.seed) if config.start_drawn else accuracy(model, tasks, tasks.held_out[:200])
            if found >= config.start_accuracy:
                say(f"Start: {found:.0%} of held-out {config.task} right after {step} steps on right ones.")
                return model.eval()
            model.train()
    easier = "fewer digits, " if config.task == "sums" else ""
    raise CourseError(
        f"After {config.most_start_steps} steps the start answers {found:.0%} of the {config.task}, and start_accuracy is "
        f"{config.start_accuracy:.0%}: give {easier}a smaller start_accuracy or more most_start_steps."
    )


def accuracy(model: Any, tasks: CheckedTasks, some: Sequence[Asked]) -> float:
    """The share of tasks that the likeliest answers get right."""
    from shared.finetune.answering import answer_all
    from shared.sampling import evaluating

    with evaluating(model):
        said = answer_all(model, [each.prompt for each in some], tasks.new_tokens, context=tasks.positions, stops={tasks.end})
    return sum(tasks.judge(some, [tasks.text_of(ids) for ids in said])) / len(some)


def drawn_accuracy(model: Any, tasks: CheckedTasks, seed: int) -> float:
    """The share of drawn answers that are right, of two to each of 200 held-out tasks."""
    some = tasks.held_out[:200]
    return sum(samples_of(model, tasks, some, 2, seed)[1]) / (2 * len(some))


def samples_of(model: Any, tasks: CheckedTasks, some: Sequence[Asked], each: int, seed: int) -> tuple[list[Any], list[int]]:
    """`each` drawn answers to every task, at temperature 1, side by side, and how many to each are right."""
    from shared.model.init import stream_seed
    from shared.preference.rollout import Sample
    from shared.rl.generation import CachedSampler
    from shared.sampling import evaluating

    numbers = [number for number in range(len(some)) for _ in range(each)]
    seeds = [stream_seed(f"held-out answer {place}", seed) for place in range(len(numbers))]
    prompts = [some[number].prompt for number in numbers]
    with evaluating(model):
        found = CachedSampler(tasks.new_tokens, {tasks.end}, rows=256)(model, prompts, seeds, bool)
    samples = [Sample(*one) for one in zip(numbers, prompts, found, strict=True)]
    scores = reward_of(tasks, some)(samples)
    return samples, [int(sum(scores[first : first + each])) for first in range(0, len(scores), each)]


# GRPO.


def learn(
    start: Any, config: CheckedConfig, tasks: CheckedTasks, every: int = 50, reward: Callable[[Sequence[Any]], list[float]] | None = None
) -> Iterator[tuple[int, Any, Curve]]:
    """Train a copy of the start; (steps done, model, curve) after each rollout's steps.

    Args:
        every: steps between evaluations on held-out tasks.
        reward: of samples whose prompt is a number of `training_tasks(tasks)`; None for the verifier.
    """
    from shared.loop import train
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig
    from shared.optim.updater import Update
    from shared.parallel.comm.communicator import SingleRankCommunicator
    from shared.parallel.config import ParallelConfig
    from shared.parallel.mesh import Mesh
    from shared.parallel.parallelize import apply_parallel
    from shared.preference.rollouts import RolloutLoader
    from shared.preference.value_head import token_scores
    from shared.rl.generation import CachedSampler
    from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective

    curve = Curve()
    grpo = GRPOConfig(
        prompts=config.prompts, answers=config.answers, new_tokens=tasks.new_tokens, passes=config.passes, minibatches=1,
        kl_coefficient=config.kl_coefficient,
    )  # fmt: skip
    training = training_tasks(tasks)
    optimizer = OptimizerConfig("adamw", lr=config.learning_rate)
    strategy = apply_parallel(copy.deepcopy(start), Mesh(ParallelConfig(), SingleRankCommunicator()), optimizer)
    loader = RolloutLoader(
        strategy, [each.prompt for each in training], sampler=CachedSampler(tasks.new_tokens, {tasks.end}, rows=256),
        reward=reward or reward_of(tasks, training), config=grpo, advantages=GRPOAdvantages(grpo), seq=64, micro_batch_size=64,
        seed=config.seed, reference=lambda batch: token_scores(start, batch)[0],
    )  # fmt: skip
    made = build_optimizer(strategy.optim_params, optimizer, strategy.routes)
    curve.held_out.append((0, accuracy(strategy.module, tasks, tasks.held_out)))
    for step, _ in train(strategy.model, made, loader, GRPOObjective(grpo), steps=config.steps, updater=Update(1.0)):
        if step % every == 0 or step == config.steps:
            curve.held_out.append((step, accuracy(strategy.module, tasks, tasks.held_out)))
        if step % config.passes == 0:
            curve.rollouts.append(dict(loader.metrics))
            yield step, strategy.module, curve
