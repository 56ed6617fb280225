"""Chapter 11. Rollouts as a data loader: sample answers from the policy, reward them, estimate advantages, yield minibatches of them.

    prompts -> sampler -> answers -> reward           a number for each answer
                               |  -> policy, reference      log-probabilities and values of each token, by the trainer's own pass
                               v
    advantages -> passes x minibatches of packed rows, each one step; then the next prompts

The engine knows nothing of this: it asks for the micro-batches of a step, and the first step of a rollout takes longer. Between two steps
the loader calls the model that objectives call, so rollouts work in every layout. Every data rank samples its shard of the answers, and all
ranks then hold the whole rollout: what is computed over it (whitening, groups, packing) is the same in all layouts.

A resumed run continues with the same open rollout, also on other ranks: its answers and their columns are the loader's state.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.batches import split_batch
from shared.course.errors import CourseError
from shared.data.loader import require_same_rows
from shared.devices import on_device
from shared.engine.callbacks import Callback, Metrics
from shared.model.init import stream_seed
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.preference.rollout import (
    Advantages, AnswerRows, OpenRollout, Rollout, RolloutConfig, Sample, minibatch, sample_of, scores_of,
)  # fmt: skip
from shared.preference.gathering import gathers_once
from shared.preference.reference import Score
from shared.preference.rewards import Reward, reward_all
from shared.preference.sampler import Sampler
from shared.preference.value_head import token_scores
from shared.sampling import evaluating
from shared.totals import Batch


@dataclass
class RolloutLoader:
    """Loader of each step's micro-batches of this data rank, from answers that the policy generates between steps.

    A batch has `input_ids`, `targets`, `documents`, `positions`, `old_log_probs`, and the columns that `advantages` makes, all [rows, seq].

    Args:
        strategy: of the policy. Its `model` samples and scores.
        prompts: ids, one or more each. They are taken in an order that `seed` decides, epoch after epoch.
        sampler: samples the answers.
        reward: scores them. Every rank calls it with its share; the numbers of the first rank of each share count. One that has `parts`, a
            dictionary for each answer of the last call, gets a metric for each of them.
        config: sizes.
        advantages: what is learned from a rollout.
        seq: positions in a row.
        micro_batch_size: rows in a micro-batch.
        seed: of the order of the prompts, of the answers and of the minibatches.
        reference: what the policy is held near to; None for nothing.
        computed_in: the autocast dtype of the run; None for the weights' own.
        cache: bytes of the sampler's KV cache, at most.
        say: called with a line on how sharded weights are gathered, at first and whenever that changes; None for no output.

    Attributes:
        position: prompts that were answered so far, over all ranks.
        current: the rollout that is being trained on; None between two.
        metrics: of the rollout that the last step trained on.
        is_rolling: true while a rollout is generated, and after one has failed.
        once: whether the last rollout gathered all weights once; None before the first.
    """

    strategy: ParallelStrategy
    prompts: Sequence[Sequence[int]]
    sampler: Sampler
    reward: Reward
    config: RolloutConfig
    advantages: Advantages
    seq: int
    micro_batch_size: int
    seed: int = 0
    reference: Score | None = None
    computed_in: torch.dtype | None = None
    cache: float = 0.0
    say: Callable[[str], None] | None = None
    position: int = field(default=0, init=False)
    current: OpenRollout | None = field(default=None, init=False)
    metrics: Metrics = field(default_factory=dict, init=False)
    is_rolling: bool = field(default=False, init=False)
    once: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.mesh = self.strategy.mesh
        require_prompts(self.prompts, self.config.new_tokens, self.seq)
        answers, ranks = self.config.prompts * self.config.answers, self.mesh.data.size
        if answers % ranks:
            raise CourseError(f"A rollout of {answers} answers cannot be shared equally among {ranks} data ranks: change prompts.")
        if self.mesh.cp.size > 1:
            raise CourseError("Rollouts have not been compared under parallel.context_parallel: set it to 1.")

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            if self.current is None:
                self.current = self.roll_out()
                self.position += self.config.prompts
            opened = self.current
            microbatches = self.minibatch(opened)
            opened.done += 1
            if opened.done == self.config.passes * self.config.minibatches:
                self.current = None
            self.metrics = opened.metrics
            yield microbatches

    def minibatch(self, opened: OpenRollout) -> list[Batch]:
        """This rank's micro-batches of the rollout's next step."""
        number, part = divmod(opened.done, self.config.minibatches)
        seed = stream_seed(f"minibatches {self.position} {number}", self.seed)
        order = np.random.default_rng(seed).permutation(len(opened.samples))
        chosen = np.split(order, self.config.minibatches)[part].tolist()
        return self.own_rows(minibatch(opened.samples, opened.columns, chosen, self.seq, self.mesh.data.size * self.micro_batch_size))

    def own_rows(self, batch: Batch) -> list[Batch]:
        """This data rank's shard of the rows, in micro-batches."""
        data = self.mesh.data
        return split_batch({name: rows.chunk(data.size)[data.rank] for name, rows in batch.items()}, self.micro_batch_size)

    # A rollout.

    def roll_out(self) -> OpenRollout:
        """Generate answers to the next prompts. Every rank calls it, and has all answers afterwards."""
        device, self.is_rolling = next(self.strategy.module.parameters()).device, True
        with torch.no_grad(), evaluating(self.strategy.model), self.gathering():
            samples = self.answered(device)
            with torch.autocast(device.type, self.computed_in, enabled=self.computed_in is not None):
                rollout = self.scored(samples, device)
        columns, metrics = self.advantages(rollout)
        self.is_rolling = False
        return OpenRollout(samples, {"old_log_probs": rollout.log_probs} | columns, rollout.metrics() | metrics)

    def gathering(self) -> AbstractContextManager:
        """A context in which sharded weights are gathered as the configuration asks, or as memory allows."""
        once, reason = gathers_once(self.strategy, self.config.gather, self.cache)
        if self.say and reason and once != self.once:
            self.say(reason)
        self.once = once
        return self.strategy.gathering(once)

    def answered(self, device: torch.device) -> list[Sample]:
        """The answers to the next prompts with their scores, on every rank."""
        with torch.autocast(device.type, self.computed_in, enabled=self.computed_in is not None):
            mine = self.own_answers()
        return self.share(mine)

    def own_answers(self) -> list[Sample]:
        """Sample this data rank's shard of the answers."""
        data, count = self.mesh.data, self.config.answers
        wanted = [(place, answer) for place in range(self.position, self.position + self.config.prompts) for answer in range(count)]
        share = len(wanted) // data.size
        mine = wanted[data.rank * share : (data.rank + 1) * share]
        numbers = [self.prompt_at(place) for place, _ in mine]
        prompts = [list(self.prompts[number]) for number in numbers]
        seeds = [stream_seed(f"answer {answer} to prompt {place}", self.seed) for place, answer in mine]
        completions = self.sampler(self.strategy.model, prompts, seeds, self.anyone)
        return [Sample(*each) for each in zip(numbers, prompts, completions, strict=True)]

    def prompt_at(self, place: int) -> int:
        """The number of the prompt at a position in the order of all epochs."""
        epoch, index = divmod(place, len(self.prompts))
        return int(np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))[index])

    def anyone(self, is_open: bool) -> bool:
        """Whether a rank that must run the model with this one has unfinished answers: those that share weights or experts. They agree on
        their hosts, which wait for no GPU."""
        if self.mesh.fsdp.size == 1 and self.mesh.config.expert_parallel == 1:
            return is_open
        flag = torch.tensor([float(is_open)])
        self.mesh.data.all_reduce(flag, op="max")
        return bool(flag)

    def share(self, mine: list[Sample]) -> list[Sample]:
        """The answers of all data ranks with their scores, in the order of their prompts."""
        scores = agreed(self.mesh.world, partial(reward_all, self.reward, mine))
        parts = getattr(self.reward, "parts", [{} for _ in mine])
        leads = self.mesh.tp.rank == self.mesh.pp.rank == 0
        judged = [sample._replace(score=score, parts=part) for sample, score, part in zip(mine, scores, parts, strict=True)]
        gathered = self.mesh.world.gather_objects([self.mesh.data.rank, judged] if leads else None)
        shares = sorted((each for each in gathered if each is not None), key=lambda each: each[0])
        return [sample_of(each) for _, share in shares for each in share]

    def scored(self, samples: list[Sample], device: torch.device) -> Rollout:
        """The rollout with the log-probabilities and values of each token. Every data rank scores its shard of the rows."""
        rows = AnswerRows(samples, self.seq, self.mesh.data.size * self.micro_batch_size)
        parts: list[tuple[Tensor, ...]] = []
        for batch in self.own_rows(rows.batch):
            batch = on_device(batch, device)
            found = token_scores(self.strategy.model, batch, self.config.temperature)
            parts.append(found if self.reference is None else (*found, self.reference(batch)))
        log_probs, *more = (rows.take(self.all_rows(torch.cat(each))) for each in zip(*parts, strict=True))
        reference = log_probs if self.reference is None else more.pop()
        sampled = torch.zeros_like(log_probs)
        for row, sample in zip(sampled, samples, strict=True):
            row[: len(sample.completion.ids)] = torch.tensor(sample.completion.log_probs, dtype=log_probs.dtype)
        ended = torch.tensor([sample.completion.ended for sample in samples])
        scores = scores_of(samples, log_probs.dtype)
        values = more[0] if more else torch.zeros_like(log_probs)
        return Rollout(samples, self.config.answers, scores, rows.lengths, ended, log_probs, sampled, reference, values)

    def all_rows(self, mine: Tensor) -> Tensor:
        """[own rows, seq] -> [rows, seq] of all data ranks, on the CPU."""
        whole = mine.new_empty(self.mesh.data.size * len(mine), mine.shape[1])
        self.mesh.data.all_gather(whole.flatten(), mine.contiguous().flatten())
        return whole.cpu()

    # State.

    def settings(self) -> dict[str, Any]:
        """Settings that decide which answers are sampled."""
        digest = hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in self.prompts]).encode()).hexdigest()
        return {"seed": self.seed, "answers": self.config.answers, "prompts": digest}

    def sizes(self) -> list[int]:
        """Settings that decide in which step an answer of an open rollout is."""
        return [self.config.prompts, self.config.passes, self.config.minibatches]

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts and the open rollout: the same on every rank, and JSON."""
        more = self.advantages.state_dict() if hasattr(self.advantages, "state_dict") else {}
        opened = None if self.current is None else self.current.state()
        state = {"position": self.position, "current": opened, "metrics": self.metrics, "advantages": more}
        return state | {"settings": self.settings(), "sizes": self.sizes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of another loader, on any number of ranks; with a new rollout where the open one had other sizes.

        Raises:
            CourseError: the prompts, their number of answers or the seed differ.
        """
        require_same_rows(state["settings"], self.settings())
        self.position, self.metrics = state["position"], state["metrics"]
        fits = state["current"] is not None and state.get("sizes", self.sizes()) == self.sizes()
        self.current = OpenRollout.of_state(state["current"]) if fits else None
        if hasattr(self.advantages, "load_state_dict"):
            self.advantages.load_state_dict(state["advantages"])


def require_prompts(prompts: Sequence[Sequence[int]], new_tokens: int, seq: int) -> None:
    """Reject prompts that are empty or after which no answer fits."""
    if not len(prompts):
        raise CourseError("There are no prompts to answer: give at least one.")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise CourseError(f"Prompt {number} is empty: a model needs at least one token to continue from.")
        if len(prompt) + new_tokens > seq:
            raise CourseError(
                f"Prompt {number} has {len(prompt)} tokens, which with new_tokens {new_tokens} do not fit into a row of {seq}: give "
                "shorter prompts, fewer new_tokens or a larger seq."
            )


class RolloutMetrics(Callback):
    """Logs the metrics of the rollout that a step trained on, as `rollout/...`."""

    def __init__(self, loader: RolloutLoader):
        self.loader = loader

    def measure(self, engine: Any) -> Metrics:
        return {f"rollout/{name}": value for name, value in self.loader.metrics.items()}

    def on_error(self, engine: Any, error: BaseException) -> None:
        """Save the last step if a reward failed: once it is fixed, the same command resumes with that rollout."""
        alike = isinstance(error, CourseError) and (error.on_all_ranks or engine.strategy.size == 1)
        if alike and self.loader.is_rolling and engine.saved_at != engine.step > 0:
            engine.save()
            engine.note_saved(wait=True, last=True)
            engine.console.print(f"Step {engine.step} is saved; what follows ends the run.", highlight=False)
