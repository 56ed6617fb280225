"""Chapter 03. Text generation and infilling from a trained model: continue a prompt, fill a gap between a prefix and a suffix.

A gap is a line cut out of a held-out document, so its true content is known. The model is asked as it was trained, in psm order: prefix,
suffix, and then the token that says "now the middle". What it writes ends with the token that ends a document.

Left out on purpose: keeping keys and values between tokens, which makes this many times faster. Chapter 12 does.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from shared.course.errors import CourseError
from shared.data.shards import TokenStore
from shared.data.tokenizer import TextTokenizer
from shared.sampling import generate

LINES = 10  # of a document, that come before its gap at least


class Gap(NamedTuple):
    """A line taken out of a held-out document, and what a model put in its place."""

    name: str
    prefix: str
    middle: str
    suffix: str
    filled: str = ""

    @property
    def right(self) -> bool:
        """Whether what was filled in is what stood there, spaces at the ends aside."""
        return self.filled.strip() == self.middle


def find_gaps(store: TokenStore, tokenizer: TextTokenizer, count: int, seed: int, before: int = 300, after: int = 150) -> list[Gap]:
    """Lines of documents, each without its indentation: the middle. Fewer than `count` if there are fewer documents long enough.

    Args:
        before, after: characters of the document that stand around the gap.
    """
    draw = np.random.default_rng(seed)
    gaps: list[Gap] = []
    for number in draw.permutation(len(store)):
        if len(gaps) == count:
            break
        lines = tokenizer.decode(store.document(number)).splitlines(keepends=True)
        places = [i for i in range(LINES, len(lines) - 3) if 20 <= len(lines[i].strip()) <= 60]
        if places:
            chosen = int(draw.choice(places))
            middle = lines[chosen].strip()
            indentation, line_end = lines[chosen].split(middle, 1)
            prefix, suffix = "".join(lines[:chosen]) + indentation, line_end + "".join(lines[chosen + 1 :])
            gaps.append(Gap(f"held-out document {number}, line {chosen + 1}", prefix[-before:], middle, suffix[:after]))
    return gaps


def fill_gap(model: nn.Module, tokenizer: TextTokenizer, gap: Gap, new_tokens: int, **drawing: Any) -> Gap:
    """The gap with what the model writes into it. `drawing` goes to `continue_ids`."""
    return gap._replace(filled=tokenizer.decode(continue_ids(model, tokenizer, gap_ids(tokenizer, gap), new_tokens, **drawing)))


def gap_ids(tokenizer: TextTokenizer, gap: Gap) -> list[int]:
    """What a model reads before it fills the gap."""
    prefix, suffix, middle, _ = tokenizer.fim_tokens
    return [prefix, *tokenizer.encode(gap.prefix), suffix, *tokenizer.encode(gap.suffix), middle]


def require_prompt(tokenizer: TextTokenizer, prompt: str) -> None:
    """Refuse, before a model is trained, a prompt that it could not continue."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise CourseError(f"The prompt {prompt!r} holds half a character (a lone surrogate): give UTF-8 text.") from None
    if not tokenizer.encode(prompt):
        raise CourseError(f"The prompt {prompt!r} has no token in the vocabulary: give another one.")


def continue_ids(
    model: nn.Module,
    tokenizer: TextTokenizer,
    prompt: list[int],
    new_tokens: int,
    *,
    context: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: Generator | None = None,
) -> list[int]:
    """What the model continues `prompt` with, up to the end of the document, without the token that ends it.

    Args:
        new_tokens: at most. The model sees the last `context` tokens, so a prompt and an answer that are longer together lose
            the prompt's beginning.
        temperature: 0 takes the likeliest token.
    """
    device = next(model.parameters()).device
    ids: list[int] = []
    drawn = generate(
        model, torch.tensor([prompt], device=device), new_tokens, context=context, temperature=temperature, top_k=top_k, generator=generator
    )
    for token in map(Tensor.item, drawn):
        if token == tokenizer.end_id:
            break
        ids.append(token)
    return ids
