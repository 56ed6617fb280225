"""GRPO on sums: a small model that adds two numbers right now and then learns from a verifier alone. Chapter 12's run and study share this.

    123+456=        wants        579.        and nothing else

Digits and signs are token ids of their own. The model is fine-tuned on right sums until it answers a part of them, and no further; from
there on it sees no answer but its own, each with a reward of 1 or 0.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ZERO, PLUS, EQUALS, END = 1, 11, 12, 13  # token ids: a digit is ZERO and its value; 0 is padding
VOCAB_SIZE = 14
SIGNS = {PLUS: "+", EQUALS: "=", END: "."}
HELD_OUT = 500  # prompts that nothing is trained on


@dataclass
class SumsConfig:
    """A start that knows a part of the sums, and GRPO from there.

    Args:
        digits: of each of the two numbers, at most.
        start_accuracy: held-out share that the fine-tuned start answers right, greedily, before it is left alone.
        start_rate: AdamW's learning rate of the fine-tuning, on batches of 128 sums.
        most_start_steps: after which the fine-tuning gives up.
        steps: of GRPO; each rollout has `passes` of them.
        prompts, answers: of a rollout; answers to each prompt.
        passes: over the answers of a rollout.
        learning_rate: AdamW's, of GRPO.
        kl_coefficient: what moving away from the start costs.
        width, layers: of the model.
        seed: of weights, sums and answers.
    """

    digits: int = 3
    start_accuracy: float = 0.2
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

    @property
    def new_tokens(self) -> int:
        """Of the longest right answer, and one more, so that an answer may also be too long."""
        return self.digits + 3


@dataclass
class Curve:
    """What a run saw. rollouts: for each, its metrics. held_out: (steps done, share of held-out sums answered right greedily)."""

    rollouts: list[dict[str, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


# The task.


def ids_of(text: str) -> list[int]:
    return [next((token for token, sign in SIGNS.items() if sign == letter), ZERO + ord(letter) - ord("0")) for letter in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(SIGNS.get(token) or (str(token - ZERO) if ZERO <= token < PLUS else "?") for token in ids)


def sums_of(config: SumsConfig) -> tuple[list[tuple[int, int]], Iterator[tuple[int, int]]]:
    """Held-out pairs of numbers, and an endless draw of others."""
    draw = random.Random(config.seed)
    pair = lambda: (draw.randrange(10**config.digits), draw.randrange(10**config.digits))
    held_out = [pair() for _ in range(min(HELD_OUT, 10 ** (2 * config.digits) // 10))]
    kept = set(held_out)
    return held_out, (each for each in iter(pair, None) if each not in kept)


def prompt_of(numbers: tuple[int, int]) -> list[int]:
    return ids_of("+".join(map(str, numbers)) + "=")


def answered(completion: Any) -> str:
    """What an answer says, without its end."""
    return text_of(completion.said)


def reward_of_sums(pairs: Sequence[tuple[int, int]]) -> Callable[[Sequence[Any]], list[float]]:
    """The verifier as a reward of samples: chapter 12's exercise, on an answer that ended by itself."""
    from shared.rl import number_reward

    def reward(samples: Sequence[Any]) -> list[float]:
        right = [str(sum(pairs[sample.prompt])) for sample in samples]
        return [
            number_reward.number_reward(answered(sample.completion), wanted) if sample.completion.ended else 0.0
            for sample, wanted in zip(samples, right, strict=True)
        ]

    return reward


# The start.


def model_settings(config: SumsConfig) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": 4,
        "intermediate_size": 3 * config.width, "max_position_embeddings": 32, "initializer_range": 0.05,
    }  # fmt: skip


def demonstrations(config: SumsConfig, pairs: Iterator[tuple[int, int]], count: int) -> Iterator[list[Any]]:
    """Batches of `count` right sums, without end."""
    from shared.preference.answer_rows import AnswerRows, Sample
    from shared.preference.sampler import Completion

    while True:
        drawn = [next(pairs) for _ in range(count)]
        samples = [Sample(0, prompt_of(each), Completion([*ids_of(str(sum(each))), END], [], True)) for each in drawn]
        yield [AnswerRows(samples, 3 * (3 * config.digits + 5), 1).batch]


def start_of(config: SumsConfig, say: Callable[[str], None]) -> Any:
    """A model that has learned from right sums until it answers `start_accuracy` of the held-out ones.

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

    held_out, others = sums_of(config)
    model = TransformerModel(ModelConfig(**model_settings(config)), seed=config.seed)
    data, found = demonstrations(config, others, 128), 0.0
    optimizer = build_optimizer(model, OptimizerConfig("adamw", lr=config.start_rate))
    for step, _ in train(model, optimizer, data, packed_next_token_objective, steps=config.most_start_steps, updater=Update(1.0)):
        if step % 20 == 0:
            found = accuracy(model, held_out[:200], config)
            if found >= config.start_accuracy:
                say(f"Start: {found:.0%} of held-out sums right after {step} steps on right ones.")
                return model.eval()
            model.train()
    raise CourseError(
        f"After {config.most_start_steps} steps the start answers {found:.0%} of the sums, and start_accuracy is "
        f"{config.start_accuracy:.0%}: give fewer digits, a smaller start_accuracy or more most_start_steps."
    )


def accuracy(model: Any, pairs: Sequence[tuple[int, int]], config: SumsConfig) -> float:
    """The share of sums that the likeliest answers get right."""
    from shared.finetune.answering import answer_all
    from shared.sampling import evaluating

    with evaluating(model):
        said = answer_all(model, [prompt_of(each) for each in pairs], config.new_tokens, context=32, stops={END})
    return sum(text_of(ids) == str(sum(each)) for ids, each in zip(said, pairs, strict=True)) / len(pairs)


def samples_of(model: Any, pairs: Sequence[tuple[int, int]], each: int, config: SumsConfig, seed: int) -> tuple[list[Any], list[int]]:
    """`each` drawn answers to every sum, at temperature 1, side by side, and how many to each are right."""
    from shared.model.init import stream_seed
    from shared.preference.answer_rows import Sample
    from shared.rl.cached_sampler import CachedSampler
    from shared.sampling import evaluating

    numbers = [number for number in range(len(pairs)) for _ in range(each)]
    seeds = [stream_seed(f"held-out answer {place}", seed) for place in range(len(numbers))]
    prompts = [prompt_of(pairs[number]) for number in numbers]
    with evaluating(model):
        found = CachedSampler(config.new_tokens, {END}, rows=256)(model, prompts, seeds, bool)
    samples = [Sample(*one) for one in zip(numbers, prompts, found, strict=True)]
    scores = reward_of_sums(pairs)(samples)
    return samples, [int(sum(scores[first : first + each])) for first in range(0, len(scores), each)]


# GRPO.


def learn(
    start: Any, config: SumsConfig, every: int = 50, reward: Callable[[Sequence[Any]], list[float]] | None = None
) -> Iterator[tuple[int, Any, Curve]]:
    """Train a copy of the start; (steps done, model, curve) after each rollout's steps.

    Args:
        every: steps between evaluations on held-out sums.
        reward: of samples whose prompt is a number of `training_sums(config)`; None for the verifier.
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
    from shared.rl.cached_sampler import CachedSampler
    from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective

    curve = Curve()
    grpo = GRPOConfig(
        prompts=config.prompts, answers=config.answers, new_tokens=config.new_tokens, passes=config.passes, minibatches=1,
        kl_coefficient=config.kl_coefficient,
    )  # fmt: skip
    held_out, _ = sums_of(config)
    pairs = training_sums(config)
    optimizer = OptimizerConfig("adamw", lr=config.learning_rate)
    strategy = apply_parallel(copy.deepcopy(start), Mesh(ParallelConfig(), SingleRankCommunicator()), optimizer)
    loader = RolloutLoader(
        strategy, [prompt_of(each) for each in pairs], sampler=CachedSampler(config.new_tokens, {END}, rows=256),
        reward=reward or reward_of_sums(pairs), config=grpo, advantages=GRPOAdvantages(grpo), seq=64, micro_batch_size=64, seed=config.seed,
        reference=lambda batch: token_scores(start, batch)[0],
    )  # fmt: skip
    made = build_optimizer(strategy.optim_params, optimizer, strategy.routes)
    curve.held_out.append((0, accuracy(strategy.module, held_out, config)))
    for step, _ in train(strategy.model, made, loader, GRPOObjective(grpo), steps=config.steps, updater=Update(1.0)):
        if step % every == 0 or step == config.steps:
            curve.held_out.append((step, accuracy(strategy.module, held_out, config)))
        if step % config.passes == 0:
            curve.rollouts.append(dict(loader.metrics))
            yield step, strategy.module, curve


def training_sums(config: SumsConfig) -> list[tuple[int, int]]:
    """The sums that GRPO asks for, none of them held out."""
    _, others = sums_of(config)
    return [next(others) for _ in range(4096)]
