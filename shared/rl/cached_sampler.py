"""Chapter 12. `CachedSampler`: answers for reinforcement learning, drawn with a KV cache: what chapter 11's `PlainSampler` draws."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shared.course.bounds import PositiveFloat, PositiveInt, Share, checked
from shared.preference.sampler import Completion
from shared.rl.generation import Drawing, generate_tokens


@dataclass(frozen=True)
@checked
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

    new_tokens: PositiveInt
    stops: Collection[int]
    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: PositiveFloat = 1.0
    rows: PositiveInt = 64
    multiple: PositiveInt = 1
    fused: bool | None = None

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
