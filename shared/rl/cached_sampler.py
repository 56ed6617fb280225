"""Chapter 12. `CachedSampler`: answers for reinforcement learning, drawn with a KV cache: what chapter 11's `PlainSampler` draws."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shared.preference.sampler import Completion
from shared.rl.generation import Drawing, generate_tokens


@dataclass(frozen=True)
class CachedSampler:
    """Draws answers with a pass over one token of each row for each token (`shared.preference.sampler.Sampler`).

    Args:
        new_tokens: of an answer at most.
        stops: tokens that end an answer.
        temperature: positive.
        top_k, top_p, min_p, repetition_penalty: as `Drawing` takes them. Log-probabilities are those of what is left.
        rows: answers that are drawn at a time.
        multiple: pad each forward pass to a multiple of this many tokens: with sequence parallelism, the tensor-parallel ranks.
        fused: see `shared.rl.decoding_cache.DecodingCache`.
    """

    new_tokens: int
    stops: Collection[int]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    rows: int = 64
    multiple: int = 1
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0:
            raise ValueError("temperature is 0: answers that are learned from must be drawn, so give a positive number.")
        if min(self.new_tokens, self.rows, self.multiple) < 1:
            raise ValueError(f"new_tokens is {self.new_tokens}, rows {self.rows}, multiple {self.multiple}: give at least 1 of each.")
        Drawing.of(self)

    def __call__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], seeds: Sequence[int], anyone: Callable[[bool], bool]
    ) -> list[Completion]:
        found = [Completion([], [], False) for _ in prompts]
        for drawn in generate_tokens(
            model, prompts, self.new_tokens, drawing=Drawing.of(self), seeds=seeds, stops=self.stops,
            rows=self.rows, multiple=self.multiple, anyone=anyone, fused=self.fused,
        ):  # fmt: skip
            answer = found[drawn.number]
            answer.ids.append(drawn.token)
            answer.log_probs.append(drawn.log_prob)
            found[drawn.number] = answer._replace(ended=drawn.ended)
        return found
