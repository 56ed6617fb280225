"""Chapter 11. Sampling of answers for reinforcement learning: each drawn token with its log-probability, from a seed for each answer.

    u ~ uniform [0, 1), a stream of its own for each answer          token = the first whose cumulative probability exceeds u

An answer depends on its prompt, its seed and the policy alone, and not on the answers that are drawn at the same time or on the ranks that
draw them. The log-probability is that of the distribution that was drawn from: after the division by the temperature.

Rows of several lengths are padded on the right. A causal model never looks there, so they need neither masks nor other positions.

Left out on purpose: keeping keys and values between tokens (chapter 12). Each token costs a pass over everything before it, and one sees
how slow that is.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shared.course.bounds import PositiveFloat, PositiveInt, checked
from shared.course.errors import CourseError


class Completion(NamedTuple):
    """A sampled answer.

    ids: its tokens, the one that ended it included.
    log_probs: of each token, under the distribution that it was sampled from.
    ended: whether its last token ends an answer; otherwise it was truncated.
    """

    ids: list[int]
    log_probs: list[float]
    ended: bool

    @property
    def said(self) -> list[int]:
        """Its tokens without the one that ended it."""
        return self.ids[:-1] if self.ended else self.ids


class Sampler(Protocol):
    """Samples an answer to each prompt. `PlainSampler` is one."""

    def __call__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], seeds: Sequence[int], anyone: Callable[[bool], bool]
    ) -> list[Completion]:
        """Args:
            model: what objectives call; in evaluation mode, without gradients.
            prompts: ids, at least one each.
            seeds: of the answers, one for each prompt; the same prompt may stand there several times.
            anyone: anyone(open) says whether any rank that shares forward passes with this one has unfinished answers. All of them give as
                many prompts, and run the model until none has.
        """


@dataclass(frozen=True)
@checked
class PlainSampler:
    """Samples answers with a pass over the whole sequence for each token, as chapter 01's `generate` does.

    Args:
        new_tokens: of an answer at most.
        stops: tokens that end an answer.
        temperature: positive.
        rows: answers that are drawn at a time.
        multiple: pad each sequence to a multiple of this length: with sequence parallelism, the number of tensor-parallel ranks.
    """

    new_tokens: PositiveInt
    stops: Collection[int]
    temperature: PositiveFloat = 1.0
    rows: PositiveInt = 64
    multiple: PositiveInt = 1

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], seeds: Sequence[int], anyone: Callable[[bool], bool]
    ) -> list[Completion]:
        found: list[Completion] = []
        for first in range(0, len(prompts), self.rows):
            found += self.draw_rows(model, prompts[first : first + self.rows], seeds[first : first + self.rows], anyone)
        return found

    def draw_rows(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], seeds: Sequence[int], anyone: Callable[[bool], bool]
    ) -> list[Completion]:
        """Sample one batch of answers. Rows that have ended stay in the batch, and their further tokens are ignored."""
        device = next(model.parameters()).device
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.stack([torch.rand(self.new_tokens, generator=stream, dtype=torch.float64) for stream in streams])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()) + self.new_tokens + self.multiple, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        found = [Completion([], [], False) for _ in prompts]
        for number in range(self.new_tokens):
            longest = int(lengths.max())
            shown = ids[:, : longest + -longest % self.multiple].to(device)
            logits = model(shown, head_fn=partial(logits_at, places=(lengths - 1).to(device)))
            tokens, log_probs = draw(logits.cpu(), uniform[:, number], self.temperature)
            require_numbers(log_probs.tolist())
            for row, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
                if not found[row].ended:
                    found[row] = Completion([*found[row].ids, token], [*found[row].log_probs, log_prob], token in self.stops)
                    ids[row, lengths[row]] = token
                    lengths[row] += 1
            if not anyone(not all(each.ended for each in found)):
                break
        return found


def require_numbers(log_probs: Iterable[float]) -> None:
    """Refuse tokens that were drawn from logits that are NaN or infinite: they mean nothing.

    Raises:
        CourseError: says what to do.
    """
    if any(map(math.isnan, log_probs)):
        raise CourseError(
            "The model's logits are not finite, so no token can be drawn: its weights are damaged, or its training diverged. Give other "
            "weights, such as an earlier checkpoint's."
        )


def logits_at(head: nn.Module, hidden_states: Tensor, places: Tensor) -> Tensor:
    """[rows, seq, D] -> the logits [rows, vocab] of one position of each row, which are all that its next token needs. places: [rows]."""
    return head.whole_logits(head(hidden_states[torch.arange(len(places), device=places.device), places]))


def draw(logits: Tensor, uniform: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw a token of each row by inverting the cumulative distribution, in float64.

    Args:
        logits: [rows, vocab].
        uniform: [rows], random numbers in [0, 1).

    Returns:
        The tokens [rows] int64 and their log-probabilities [rows] float64.

    >>> draw(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), torch.tensor([0.6]))          # the third quarter: token 2, log 1/4
    (tensor([2]), tensor([-1.3863], dtype=torch.float64))
    """
    log_probs = (logits.double() / temperature).log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    threshold = uniform.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)
