"""Chapter 12. Text generation with a KV cache and continuous refill (continuous batching): each answer from a random stream of its own.

    queue of prompts -> free rows are filled -> one token for each row -> rows whose answer is complete leave -> ...

An answer depends on its prompt, its seed and the model alone, not on the answers beside it, on the order of the queue or on the ranks that
draw them. Only rounding differs, where other rows stand in a matrix product.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.course.bounds import NonNegativeFloat, PositiveFloat, PositiveInt, Share, checked
from shared.devices import sent
from shared.finetune.soft_prompts import virtual_ids
from shared.model.transformer import TransformerModel
from shared.preference.sampler import Completion, require_numbers
from shared.rl import sampling
from shared.rl.decoding_cache import DecodingCache
from shared.sampling import evaluating

REFILL = 4  # prompts are read when 1 / REFILL of the rows are free: a pass over few prompts costs about as much as one over many


@dataclass(frozen=True)
@checked
class Drawing:
    """How the next token is drawn from logits: min-p and repetition penalty change them first, then comes `draw_tokens`.

    Args:
        temperature: 0 takes the likeliest token.
        top_k, top_p: how much of the tail is cut off; None for nothing.
        min_p: tokens below this share of the likeliest one's probability, at this temperature, are cut off first; None for none.
        repetition_penalty: logits of tokens that stand in the text so far are divided by it where positive, multiplied where negative
            (Keskar et al. 2019, section 4.1); 1 changes nothing.
    """

    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: PositiveFloat = 1.0

    @classmethod
    def of(cls, settings: Any) -> "Drawing":
        """The drawing that an object with fields of these names describes."""
        return cls(**{entry.name: getattr(settings, entry.name) for entry in fields(cls)})

    def __call__(self, logits: Tensor, uniform: Tensor, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities, [rows] each (`draw_tokens`); NaN where logits are not finite. texts: the ids of each row so far."""
        if self.repetition_penalty != 1:
            logits = penalise_repetition(logits, texts, self.repetition_penalty)
        usable = logits.amax(dim=-1, keepdim=True).isfinite()
        logits = torch.where(usable, logits, 0.0)  # of NaN, the place in the vocabulary would be beyond its end
        if self.min_p is not None and self.temperature > 0:
            least = logits.amax(dim=-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        tokens, log_probs = sampling.draw_tokens(logits, uniform, self.temperature, self.top_k, self.top_p)
        return tokens, torch.where(usable.squeeze(-1), log_probs, torch.nan)


def penalise_repetition(logits: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019): [rows, vocab] logits, smaller for the ids in each row's text. A copy."""
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        ids = torch.tensor(sorted({token for token in text if token < len(row)}), device=row.device)  # virtual tokens have no logits
        row[ids] = torch.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
    return logits


class Drawn(NamedTuple):
    """A token of the answer to prompt `number`. ended: it, or the string that it completes, ends an answer. last: no more tokens come."""

    number: int
    token: int
    log_prob: float
    ended: bool
    last: bool


@dataclass
class OpenRow:
    """An answer that is being drawn. uniform: its random numbers. room: tokens at most."""

    number: int
    prompt: Sequence[int]
    uniform: list[float]
    room: int
    ids: list[int] = field(default_factory=list)


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    drawing: Drawing = Drawing(),  # noqa: B008 (frozen)
    seeds: Sequence[int] | None = None,
    stops: Collection[int] = (),
    stop_here: Callable[[list[int]], bool] | None = None,
    context: int | None = None,
    start_id: int | None = None,
    rows: int = 64,
    multiple: int = 1,
    anyone: Callable[[bool], bool] = bool,
    fused: bool | None = None,
) -> Iterator[Drawn]:
    """Yield the tokens of the answers to all prompts, each as soon as it is sampled; the tokens of one answer come in order.

    Args:
        model: in evaluation mode: a decoder or an encoder-decoder, or what stands for it on a rank.
        prompts: ids, at least one each.
        new_tokens: of an answer, at most.
        seeds: of the answers' random streams, one for each prompt; None for 0, 1, ...
        stops: tokens that end an answer.
        stop_here: whether an answer's ids so far are a complete one (`stop_strings`).
        context: positions that the model reads at most, prompt and answer; None for no limit. An answer that reaches it ends there.
        start_id: what the decoder of an encoder-decoder begins with; None for a decoder.
        rows: answers that are drawn at a time.
        multiple: pad each forward pass to a multiple of this many tokens: with sequence parallelism, the tensor-parallel ranks.
        anyone: see `shared.preference.sampler.Sampler`.
        fused: see `DecodingCache`.

    Raises:
        ValueError: a prompt is empty, or longer than the context; a size below 1; the cache cannot serve this model.
        CourseError: the logits are not finite.
    """
    begins = [len(prompt) if start_id is None else 1 for prompt in prompts]
    require_prompts(prompts, begins, context, min(new_tokens, rows, multiple))
    room = [new_tokens if context is None else min(new_tokens, context - begin + 1) for begin in begins]
    places = max((begin + most - 1 for begin, most in zip(begins, room, strict=True)), default=1)
    longest = max(map(len, prompts), default=1)
    cache = DecodingCache(model, max(1, min(rows, len(prompts))), places, 0 if start_id is None else longest, multiple, fused)
    queue = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))  # neighbours are about equally long
    active: list[OpenRow] = []
    while anyone(bool(queue or active)):
        free = len(cache.lengths) - len(active)
        if queue and free >= min(len(queue), math.ceil(len(cache.lengths) / REFILL)):
            numbers, queue = queue[:free], queue[free:]
            new = [OpenRow(each, prompts[each], stream(room[each], seeds[each] if seeds else each), room[each]) for each in numbers]
            read = [row.prompt for row in new]
            logits = cache.read(read) if start_id is None else cache.read_pairs(read, start_id)
            first, active = len(active), active + new
        elif active:
            first, logits = 0, cache.step([row.ids[-1] for row in active])
        else:
            cache.idle()
            continue
        fresh = active[first:]
        uniform = torch.tensor([row.uniform[len(row.ids)] for row in fresh], dtype=torch.float64)
        texts = [[*(row.prompt if start_id is None else [start_id]), *row.ids] for row in fresh] if drawing.repetition_penalty != 1 else []
        tokens, log_probs = drawing(logits, sent(uniform, logits.device), texts)
        found = torch.stack([tokens.double(), log_probs.double()]).tolist()  # together: the one wait for a GPU
        require_numbers(found[1])
        complete = []
        for place, (row, token, log_prob) in enumerate(zip(fresh, map(int, found[0]), found[1], strict=True)):
            row.ids.append(token)
            ended = token in stops or (stop_here is not None and stop_here(row.ids))
            last = ended or len(row.ids) == row.room
            if last:
                complete.append(first + place)
            yield Drawn(row.number, token, log_prob, ended, last)
        for place in reversed(complete):
            cache.drop(place)
            active[place] = active[-1]
            active.pop()


def stream_answer(model: TransformerModel, prompt: Sequence[int], new_tokens: int, *, context: int, **settings: Any) -> Iterator[int]:
    """Yield the ids of the answer to one prompt as they are sampled, without its end token. Takes the arguments of `generate_tokens`."""
    with evaluating(model):
        for drawn in generate_tokens(model, [[*virtual_ids(model), *prompt]], new_tokens, context=context, **settings):
            if not drawn.ended:
                yield drawn.token


def answer_all(
    model: TransformerModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    context: int,
    stops: Collection[int],
    start_id: int | None = None,
    drawing: Drawing = Drawing(temperature=0.0),  # noqa: B008 (frozen)
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """The answer to each prompt, greedy unless `drawing` says otherwise, without its end token: as chapter 10's `answer_all`, but an
    answer ends where the context does."""
    before, found = virtual_ids(model), [[] for _ in prompts]
    settings = {"drawing": drawing, "seeds": seeds, "context": context, "stops": stops, "start_id": start_id}
    with evaluating(model):
        for drawn in generate_tokens(model, [[*before, *prompt] for prompt in prompts], new_tokens, **settings):
            if not drawn.ended:
                found[drawn.number].append(drawn.token)
    return found


def stream(room: int, seed: int) -> list[float]:
    """The random numbers of an answer of at most `room` tokens, the same as in chapter 11's `PlainSampler`. More room only adds some."""
    return torch.rand(room, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def stop_strings(decode: Callable[[list[int]], str], strings: Collection[str]) -> Callable[[list[int]], bool]:
    """A rule for `stop_here`: the text of the ids contains one of the strings."""
    if "" in strings:
        raise ValueError("A stop string is empty: every answer would end at once. Leave it out.")

    def stop_here(ids: list[int]) -> bool:
        text = decode(ids)
        return any(string in text for string in strings)

    return stop_here


def require_prompts(prompts: Sequence[Sequence[int]], begins: Sequence[int], context: int | None, smallest: int) -> None:
    """See `generate_tokens`."""
    if smallest < 1:
        raise ValueError("new_tokens, rows and multiple: give at least 1 of each.")
    for number, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
        if not len(prompt):
            raise ValueError(f"Prompt {number} is empty: give at least one token to continue from.")
        if context is not None and begin > context:
            raise ValueError(f"Prompt {number} has {begin} tokens, and the model reads {context}: shorten it.")


@dataclass(frozen=True)
@checked
class CachedSampler:
    """Samples answers with a KV cache, one forward pass over one token of each row per token (`shared.preference.sampler.Sampler`).

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
