"""Chapter 11. A rollout: answers that a policy gave, with the log-probability, reference and value of each of their tokens.

The columns are [answers, time]: an answer begins at time 0 and ends at its length. A checkpoint holds an open rollout as JSON, which keeps
every number to its last bit.
"""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.course.bounds import PositiveFloat, PositiveInt, checked
from shared.engine.callbacks import Metrics
from shared.preference.answer_rows import Sample
from shared.preference.gathering import Gather
from shared.preference.sampler import Completion


@dataclass(frozen=True)
@checked
class RolloutConfig:
    """How answers are sampled, and how often they are trained on.

    Args:
        prompts: of a rollout, over all ranks.
        answers: to each prompt.
        new_tokens: of an answer at most.
        temperature: of sampling, and of the log-probabilities that are compared.
        rows: answers that are drawn at a time on each rank. Fewer need a smaller KV cache.
        passes: over a rollout's answers.
        minibatches: in each pass; each is one step.
        gather: of fully sharded weights, once for a rollout, or block by block for each token, which is slower and holds little more than
            the shards; auto gathers once where whole weights and the cache fit on every rank.
    """

    prompts: PositiveInt = 32
    answers: PositiveInt = 1
    new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    rows: PositiveInt = 64
    passes: PositiveInt = 2
    minibatches: PositiveInt = 2
    gather: Gather = "auto"

    def __post_init__(self) -> None:
        if self.prompts * self.answers % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches} and does not divide the {self.prompts * self.answers} answers of a rollout "
                "(prompts x answers): change one of them."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """What tokens are drawn by, as settings of a sampler."""
        return {"temperature": self.temperature}


@dataclass
class Rollout:
    """The answers to some prompts, and what is known of each token. Answers to one prompt are neighbours.

    samples: the answers; `group` of them to each prompt.
    scores: [answers], what each was rewarded with.
    lengths: [answers] int64, tokens in each.
    ended: [answers] bool.
    log_probs: [answers, time], of each token under the policy that drew it, as the trainer computes them; 0 behind an answer's end.
    sampled: the same, as the sampler recorded them.
    reference: the same under the reference; equal to log_probs where there is none.
    values: [answers, time], of the state before each token; zeros without a value head.
    parts: for each answer what its score is made of, by name.
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
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def mask(self) -> Tensor:
        """[answers, time] bool, the positions that hold a token."""
        return torch.arange(self.log_probs.shape[1]) < self.lengths[:, None]

    def metrics(self) -> Metrics:
        """Means over answers; `sampler_difference` is the largest over all tokens."""
        kl = (self.log_probs - self.reference).sum(dim=1)
        names = self.parts[0] if self.parts else ()
        return {
            "reward": self.scores.mean().item(),
            **{f"reward/{name}": fmean(each[name] for each in self.parts) for name in names},
            "reward_deviation": self.scores.std(correction=0).item(),
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
    """A rollout whose steps are not all done: what a checkpoint holds of it.

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
    """A sample that has been JSON."""
    prompt, prompt_ids, completion = state
    return Sample(prompt, prompt_ids, Completion(*completion))
