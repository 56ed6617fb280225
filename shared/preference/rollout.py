"""Chapter 11. A rollout: sampled answers, their packed rows, and the log-probability, reference and value of each of their tokens.

A sequence is a prompt and its answer. The position before a token predicts it, so an answer's first position is the prompt's last token.

The columns are [answers, time]: an answer begins at time 0 and ends at its length. A checkpoint holds an open rollout as JSON, which keeps
every number to its last bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.bounds import Bounds, PositiveFloat, PositiveInt, checked
from shared.data.packing import pack_documents, plan_rows
from shared.data.rows import padding_row, stack_rows
from shared.engine.callbacks import Metrics
from shared.loss import IGNORED
from shared.preference.gathering import Gather
from shared.preference.sampler import Completion
from shared.totals import Batch

MOST_ANSWERS = 1_000_000  # of a rollout, which are in memory together


class Sample(NamedTuple):
    """An answer to a prompt.

    prompt: its number in the list of prompts. prompt_ids: the prompt's tokens. score: its reward, 0 before it is judged, None where no
    reward applies to it. parts: the rewards that the score is made of, by name.
    """

    prompt: int
    prompt_ids: list[int]
    completion: Completion
    score: float | None = 0.0
    parts: dict[str, float] = {}  # noqa: RUF012 (never changed)

    @property
    def predictions(self) -> int:
        """Positions that it takes in a row."""
        return len(self.prompt_ids) + len(self.completion.ids) - 1


def scores_of(samples: Sequence[Sample], dtype: torch.dtype) -> Tensor:
    """[answers], the score of each; NaN where no reward applies."""
    return torch.tensor([math.nan if each.score is None else each.score for each in samples], dtype=dtype)


class AnswerRows:
    """Some answers in packed rows.

    Args:
        samples: one or more.
        seq: positions in a row, at least what the longest of them takes.
        multiple: the number of rows is a multiple of this; rows of padding fill it up.

    Attributes:
        batch: `input_ids`, `targets` (of the answers' tokens alone), `documents` and `positions`, [rows, seq].
        places: [answers, 2] int64, the row and the first position of each answer.
        lengths: [answers] int64, its tokens.
    """

    def __init__(self, samples: Sequence[Sample], seq: int, multiple: int):
        rows, self.places = [], torch.zeros(len(samples), 2, dtype=torch.int64)
        self.lengths = torch.tensor([len(each.completion.ids) for each in samples])
        plan = plan_rows(np.array([each.predictions + 1 for each in samples]), seq)
        for row in range(plan.rows):
            numbers, start = [segment.document for segment in plan.segments(row)], 0
            documents = [[*samples[number].prompt_ids, *samples[number].completion.ids] for number in numbers]
            rows.append(pack_documents([torch.tensor(each) for each in documents], seq))
            for number in numbers:
                self.places[number] = torch.tensor([row, start + len(samples[number].prompt_ids) - 1])
                start += samples[number].predictions
        rows += [padding_row(seq)] * (-len(rows) % multiple)
        self.batch = stack_rows(rows)
        answers = self.put(torch.ones(len(samples), int(self.lengths.max())))
        self.batch["targets"] = self.batch["targets"].where(answers > 0, IGNORED)

    def put(self, column: Tensor) -> Tensor:
        """[answers, time] -> [rows, seq]: what belongs to each token of the answers, and 0 elsewhere."""
        whole = column.new_zeros(self.batch["input_ids"].shape)
        for values, (row, start), length in zip(column, self.places.tolist(), self.lengths.tolist(), strict=True):
            whole[row, start : start + length] = values[:length]
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """[rows, seq] -> [answers, time]: the values at each answer's positions; 0 behind its end."""
        time = int(self.lengths.max())
        padded = F.pad(whole, (0, time))
        taken = torch.stack([padded[row, start : start + time] for row, start in self.places.tolist()])
        return taken.where(torch.arange(time) < self.lengths[:, None], 0)


def minibatch(samples: Sequence[Sample], columns: Mapping[str, Tensor], chosen: Sequence[int], seq: int, multiple: int) -> Batch:
    """Rows of some of the answers, with columns [answers, time] at the positions of their tokens."""
    rows = AnswerRows([samples[number] for number in chosen], seq, multiple)
    return rows.batch | {name: rows.put(column[chosen]) for name, column in columns.items()}


@dataclass(frozen=True)
@checked
class RolloutConfig:
    """How answers are sampled, and how often they are trained on.

    Args:
        prompts: prompts per rollout, over all ranks.
        answers: answers sampled for each prompt.
        new_tokens: the largest number of tokens in an answer.
        temperature: temperature of sampling and of the log-probabilities in the loss.
        rows: generation batch size on each rank. Fewer rows need a smaller KV cache.
        passes: epochs over a rollout's answers.
        minibatches: minibatches in each epoch; each is one step.
        gather: of fully sharded weights, once for a rollout, or block by block for each token, which is slower and holds little more than
            the shards; auto gathers once where whole weights and the cache fit on every rank.
    """

    prompts: Annotated[int, Bounds(ge=1, le=100_000)] = 32
    answers: Annotated[int, Bounds(ge=1, le=10_000)] = 1
    new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    rows: PositiveInt = 64
    passes: PositiveInt = 2
    minibatches: PositiveInt = 2
    gather: Gather = "auto"

    def __post_init__(self) -> None:
        if self.prompts * self.answers > MOST_ANSWERS:
            raise ValueError(f"A rollout has {self.prompts * self.answers:,} answers (prompts x answers): give at most {MOST_ANSWERS:,}.")
        if self.prompts * self.answers % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches} and does not divide the {self.prompts * self.answers} answers of a rollout "
                "(prompts x answers): change one of them."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings, as arguments of a sampler."""
        return {"temperature": self.temperature}


@dataclass
class Rollout:
    """The answers to some prompts, and what is known of each token. Answers to one prompt are neighbours.

    samples: the answers; `group` of them to each prompt.
    scores: [answers], what each was rewarded with; NaN where no reward applies.
    lengths: [answers] int64, tokens in each.
    ended: [answers] bool.
    log_probs: [answers, time], of each token under the policy that drew it, as the trainer computes them; 0 behind an answer's end.
    sampled: the same, as the sampler recorded them.
    reference: the same under the reference; equal to log_probs where there is none.
    values: [answers, time], of the state before each token; zeros without a value head.
    """

    samples: list[Sample]
    group: int
    scores: Tensor
    lengths: Tensor
    ended: Tensor
    log_probs: Tensor
    sampled: Tensor
    reference: Tensor
    values: Tensor

    @property
    def mask(self) -> Tensor:
        """[answers, time] bool, the positions that hold a token."""
        return torch.arange(self.log_probs.shape[1]) < self.lengths[:, None]

    def metrics(self) -> Metrics:
        """Means over answers, of rewards over the answers that have one; `sampler_difference` is the largest over all tokens."""
        kl, scores = (self.log_probs - self.reference).sum(dim=1), self.scores[~self.scores.isnan()]
        parts: dict[str, list[float]] = {}
        for name, value in (part for sample in self.samples for part in sample.parts.items()):
            parts.setdefault(name, []).append(value)
        return {
            **({"reward": scores.mean().item(), "reward_deviation": scores.std(correction=0).item()} if len(scores) else {}),
            **{f"reward/{name}": fmean(values) for name, values in parts.items()},
            "kl_to_reference": kl.mean().item(),
            "answer_tokens": self.lengths.double().mean().item(),
            "ended": self.ended.double().mean().item(),
            "sampler_difference": (self.log_probs - self.sampled).abs().max().item(),
        }


class Advantages(Protocol):
    """Turns a rollout into what its objective needs: columns of the batch [answers, time], and metrics. One that changes from rollout to
    rollout has `state_dict` and `load_state_dict`."""

    def __call__(self, rollout: Rollout) -> tuple[dict[str, Tensor], Metrics]: ...


@dataclass
class OpenRollout:
    """A rollout with steps left, as a checkpoint holds it.

    columns: batch key -> [answers, time]. done: steps of it that were handed out.
    """

    samples: list[Sample]
    columns: dict[str, Tensor]
    metrics: Metrics
    done: int = 0

    def state(self) -> dict[str, Any]:
        columns = {name: {"dtype": str(each.dtype).removeprefix("torch."), "values": each.tolist()} for name, each in self.columns.items()}
        return {"samples": self.samples, "columns": columns, "metrics": self.metrics, "done": self.done}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "OpenRollout":
        samples = [sample_of(each) for each in state["samples"]]
        columns = {name: torch.tensor(each["values"], dtype=getattr(torch, each["dtype"])) for name, each in state["columns"].items()}
        return cls(samples, columns, state["metrics"], state["done"])


def sample_of(state: list) -> Sample:
    """A sample from JSON, perhaps without its score, as in checkpoints of an earlier version."""
    prompt, prompt_ids, completion, *judged = state
    return Sample(prompt, prompt_ids, Completion(*completion), *judged)
