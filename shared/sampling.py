"""Chapter 01. Sampling and generation: from logits to text, one token at a time.

Dividing logits by a temperature sharpens (below 1) or flattens (above 1) the distribution; top-k cuts its tail
(Fan et al. 2018, section 5.4). Generation here runs the whole context through the model at each step; the cache that
spares this is chapter 12's.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from shared.course.binding import exercise

SMALLEST = 1e-20  # a temperature below which logits divided by it overflow; long before that, the likeliest token is drawn


@exercise("01.sample_next")
def sample_next(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Generator | None = None) -> Tensor:
    """Draw the next token of each row from softmax(logits / temperature), among the `top_k` likeliest tokens.

    Args:
        logits: [batch, vocab], any floating dtype. Left unchanged. Half-precision logits are computed with in float32, where
            dividing by a small temperature does not overflow.
        temperature: 0 takes the likeliest token; otherwise positive.
        top_k: how many of the likeliest tokens may be drawn; None for all. More than `vocab` means all. Of tokens that tie for
            the last place, one may be kept or all.
        generator: the source of randomness, on the logits' device; None for torch's default.

    Returns:
        [batch] int64 token ids.

    Raises:
        ValueError: temperature below 0, or top_k below 1, each whatever the other is.

    >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
    >>> sample_next(logits, temperature=0.0)
    tensor([1])
    >>> generator = torch.Generator().manual_seed(0)
    >>> draws = [sample_next(logits, top_k=2, generator=generator).item() for _ in range(100)]
    >>> sorted(set(draws))                                         # token 0 is cut off
    [1, 2]
    """


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: Generator | None = None,
) -> Iterator[Tensor]:
    """Continue a prompt, yielding one [batch] tensor of token ids per step, as soon as it is drawn.

    Args:
        model: maps [batch, seq] ids to [batch, seq, vocab] logits. Run in evaluation mode and left as it was found.
        prompt: [batch, seq] int64 with seq of at least 1.
        context: how many of the last tokens the model is shown at each step.
        temperature: below SMALLEST it is 0.

    Raises:
        ValueError: the prompt is empty: the model needs at least one token to continue from; or what `require_drawing` refuses.
    """
    require_drawing(temperature, top_k)
    if prompt.shape[1] == 0:
        raise ValueError("The prompt is empty: give at least one token to continue from.")
    with evaluating(model):
        ids = prompt
        for _ in range(max_new_tokens):
            logits = model(ids[:, -context:])[:, -1]
            drawn = sample_next(logits, temperature if temperature >= SMALLEST else 0.0, top_k, generator)
            ids = torch.cat([ids, drawn[:, None]], dim=1)
            yield drawn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode; its mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def require_drawing(temperature: float, top_k: int | None) -> None:
    """Refuse invalid sampling settings before a model is trained to sample from.

    Raises:
        ValueError: a temperature below 0, infinite or no number; a top_k below 1.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: give 0 (likeliest token) or a positive number.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}: give at least 1, or null for all tokens.")
