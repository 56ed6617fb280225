"""Three steps of PPO on a small policy with a value head and a reference beside it, on a layout, in float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from lora_runs import DENSE, layout_of, with_biases
from mixture_runs import MODEL as MIXTURE
from mixture_runs import MixtureRun, observed
from sharded_runs import build

from shared.loop import accumulate_gradients, train_step
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE as BUILDERS
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.rollout import Rollout, Sample
from shared.preference.ppo import PPOAdvantages, PPOConfig, PPOObjective
from shared.preference.rollouts import RolloutLoader
from shared.preference.sampler import Completion, PlainSampler
from shared.preference.value_head import token_scores, with_value_head
from shared.trainer.models import RUN_AXES

NEW_TOKENS, SEQ, STOPS = 6, 16, frozenset({3, 5, 7, 11, 13})
PROMPTS = [[1 + (7 * number + place) % 20 for place in range(1 + number % 4)] for number in range(11)]  # of several lengths
PPO = PPOConfig(prompts=8, new_tokens=NEW_TOKENS, passes=2, minibatches=1, kl_coefficient=0.3, temperature=0.8, unended_penalty=0.5)
MODELS = {"dense": DENSE, "experts": MIXTURE}


def scripted(model, prompts: Sequence[Sequence[int]], seeds: Sequence[int], anyone) -> list[Completion]:
    """Answers that depend on the seed alone, of 1 to NEW_TOKENS tokens. Their log-probabilities are nobody's."""
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, NEW_TOKENS + 1, (), generator=generator))
        ids = torch.randint(14, 20, (length,), generator=generator).tolist()
        ended = length < NEW_TOKENS
        found.append(Completion([*ids[:-1], 3] if ended else ids, [-1.0] * length, ended))
    return found


def reward(samples: Sequence[Sample]) -> list[float]:
    return [sum(token % 3 for token in sample.completion.ids) / 4 - len(sample.prompt_ids) / 8 for sample in samples]


def with_values(model: TransformerModel) -> TransformerModel:
    generator = torch.Generator().manual_seed(4)
    with_value_head(with_biases(model)).head.value.weight.data.copy_(torch.randn(1, model.config.hidden_size, generator=generator) / 4)
    return model


class PPORun(MixtureRun):
    """One rank of a run. answers: the tokens of each answer so far, which every rank knows."""

    kinds = PPOObjective, PPOAdvantages, RolloutLoader
    prepare = staticmethod(with_values)

    def __init__(self, world, layout, model: str = "dense", optimizer: str = "adamw", sampler=None, ppo: PPOConfig = PPO, **settings):
        objective, advantages, loader = self.kinds
        super().__init__(world, layout, optimizer, MODELS[model], objective=objective(ppo), prepare=self.prepare, **settings)
        plain = with_biases(build(self.config, builders=BUILDERS, dtype=settings.get("dtype", torch.float64)))
        with torch.no_grad():  # another policy than the one that is trained
            for parameter in plain.parameters():
                parameter.mul_(0.9)
        reference = apply_parallel(plain, Mesh(layout, world), None, settings.get("computed_in"), axes=RUN_AXES)
        reference.model.eval()
        plain_sampler = PlainSampler(NEW_TOKENS, STOPS, ppo.temperature, rows=3, multiple=layout.tensor_parallel)
        self.loader = loader(
            self.parallel, PROMPTS, sampler=sampler or plain_sampler, reward=reward, config=ppo,
            advantages=advantages(ppo), seq=SEQ, micro_batch_size=2, seed=3,
            reference=lambda batch: token_scores(reference.model, batch, ppo.temperature)[0],
        )  # fmt: skip
        self.source, self.answers, self.seen, self.first = iter(self.loader), [], [], {}

    def train(self, steps: int) -> "PPORun":
        for _ in range(steps):
            microbatches = next(self.source)
            self.seen.append(dict(self.loader.metrics))
            if self.loader.current is not None:
                self.answers.append([sample.completion.ids for sample in self.loader.current.samples])
            self.totals = train_step(
                self.parallel.model, self.optimizer, microbatches, self.objective,
                self.parallel.runner(accumulate_gradients), self.parallel.reducer, self.parallel.updater(self.update),
            )  # fmt: skip
            self.step += 1
            self.first = self.first or self.totals.mean_metrics()
        return self


def watched(run: PPORun) -> dict:
    return observed(run) | {"answers": run.answers, "metrics": run.seen}


def on_ranks(word: str, model: str = "dense", optimizer: str = "adamw", sampler=None, **more) -> list[dict]:
    layout = layout_of(word, **more)
    work = lambda world: watched(PPORun(world, layout, model, optimizer, sampler))
    return [work(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(work, layout.ranks)


@cache
def alone(model: str = "dense", optimizer: str = "adamw", sampler=None) -> dict:
    return on_ranks("one", model, optimizer, sampler)[0]


def require_same_rollouts(found: list[dict], one: dict) -> None:
    for each in found:
        assert each["answers"] == one["answers"]
        for here, there in zip(each["metrics"], one["metrics"], strict=True):
            assert here == pytest.approx(there, rel=1e-9, abs=1e-12)


def part_of(rollout: Rollout, part: int) -> Rollout:
    return replace(rollout, **{name: value.chunk(2)[part] for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)})
