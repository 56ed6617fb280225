"""Chapter 12. Log-likelihood of continuations behind contexts, and of whole documents in rolling windows, with the rules of lm-eval.

    context        continuation                 rolling, 4 positions, overlap 1:  <end>   0    1    2   ->  0 1 2 3
    The sky is      blue                                                            3     4    5    6   ->  4 5 6 7
    -> the sum of log p(token) over the continuation                                5     6    7    8   ->        8

Each token is predicted once. A new window begins with the last `overlap` tokens of the one before; the last window, which has fewer tokens
to predict, is filled up with context. Documents never see each other. The first token stands behind the prefix token (the tokenizer's
beginning of a text, else its end), so every byte counts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.soft_prompts import virtual_ids
from shared.model.chunked_loss import chunk_rows
from shared.model.transformer import TransformerModel
from shared.rl.examination import Advance, silent
from shared.sampling import evaluating

Pair = tuple[list[int], list[int]]  # ids of a context, and of its continuation


class Scored(NamedTuple):
    """log_likelihood: of a continuation, in nats. greedy: whether each of its tokens is the likeliest one."""

    log_likelihood: float
    greedy: bool


class LikelihoodScorer:
    """Log-likelihoods of texts under a decoder.

    Args:
        model: on its device.
        prefix_id: the token that an empty context is replaced by.
        batch_tokens: positions of a batch at most, padding included; a longer text is a batch of its own.

    Attributes:
        context: tokens of text that the model reads at most.
    """

    def __init__(self, model: TransformerModel, tokenizer: TextTokenizer, prefix_id: int, batch_tokens: int = 4096):
        self.model, self.tokenizer, self.prefix_id, self.batch_tokens = model, tokenizer, prefix_id, batch_tokens
        self.before = virtual_ids(model)
        self.context = model.config.max_position_embeddings - len(self.before)

    def split(self, context: str, continuation: str, encode: Callable[[str], list[int]] | None = None) -> Pair:
        """Tokens of a context, and what comes after so many tokens where both are encoded as one text.

        Spaces at the end of the context belong to the continuation. Where tokens merge over the border, so that nothing is left of the
        continuation, its last token is scored; lm-eval gives such a one a likelihood of 1, or stops.

        Args:
            encode: of texts at whose beginning a tokenizer may put a token; None for the tokenizer's own.
        """
        encode = encode or (lambda text: self.tokenizer.tokenizer.encode(text, add_special_tokens=True).ids)
        bare = context.rstrip()
        if not bare:
            ids = self.tokenizer.encode(context + continuation)
            return ([self.prefix_id], ids) if ids[:1] != [self.prefix_id] else (ids[:1], ids[1:])
        whole, alone = encode(context + continuation), encode(bare)
        return (alone, whole[len(alone) :]) if len(alone) < len(whole) else (whole[:-1], whole[-1:])

    def windows(self, tokens: Sequence[int], overlap: int = 1) -> Iterator[Pair]:
        """The rolling windows of one document."""
        if not 1 <= overlap <= self.context:
            raise ValueError(f"overlap is {overlap}: give 1 to {self.context}, the tokens that this model reads.")
        ids, done = [self.prefix_id, *tokens], 0
        while done < len(tokens):
            end = min(len(tokens), done + (self.context - overlap + 1 if done else self.context))
            yield ids[max(0, end - self.context) : done + 1], ids[done + 1 : end + 1]
            done = end

    def rolling(self, documents: Sequence[Sequence[int]], overlap: int = 1, advance: Advance = silent) -> list[float]:
        """The log-likelihood of each document, given as ids, in nats. advance: counts documents' windows."""
        windows = [(number, pair) for number, tokens in enumerate(documents) for pair in self.windows(tokens, overlap)]
        sums = [0.0] * len(documents)
        for (number, _), scored in zip(windows, self.score([pair for _, pair in windows], advance), strict=True):
            sums[number] += scored.log_likelihood
        return sums

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair], advance: Advance = silent) -> list[Scored]:
        """Score each continuation after its context, which is truncated on the left if both do not fit."""
        for context, continuation in pairs:
            if not context or not 1 <= len(continuation) <= self.context:
                raise CourseError(
                    f"A continuation has {len(continuation):,} tokens behind a context of {len(context):,}, and the model reads "
                    f"{self.context:,}: give at least 1 token on each side, and a continuation that fits ("
                    f"{self.tokenizer.decode(continuation[:20])!r})."
                )
        rows = [(context + continuation)[-self.context - 1 :] for context, continuation in pairs]
        found: list[Scored] = [Scored(0.0, True)] * len(pairs)
        with evaluating(self.model):
            for batch in self.batches([len(row) for row in rows]):
                scored = self.score_batch([rows[number] for number in batch], [len(pairs[number][1]) for number in batch])
                for number, each in zip(batch, scored, strict=True):
                    found[number] = each
                advance(len(batch))
        return found

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of rows of about equal lengths, the longest first."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        while order:
            count = max(1, self.batch_tokens // (lengths[order[0]] + len(self.before)))
            yield order[:count]
            order = order[count:]

    def score_batch(self, rows: list[list[int]], counts: list[int]) -> list[Scored]:
        """rows: ids, of which the last `counts` are scored. Padding stands at the end, where causal attention never looks."""
        longest = max(map(len, rows)) - 1 + len(self.before)
        read = [[*self.before, *row[:-1]] for row in rows]
        device = next(self.model.parameters()).device
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in read], device=device)
        ends = [number * longest + len(row) for number, row in enumerate(read)]
        places = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]).to(device)
        targets = torch.tensor([token for row, count in zip(rows, counts, strict=True) for token in row[-count:]], device=device)
        log_probs, likeliest = self.model(ids, head_fn=lambda head, hidden: scores_of(head, hidden.flatten(0, -2)[places], targets))
        found = []
        for row, values, right in zip(rows, log_probs.cpu().split(counts), likeliest.cpu().split(counts), strict=True):
            total = values.sum().item()
            if not abs(total) < float("inf"):
                raise CourseError(
                    f"The model gives a log-likelihood of {total} to {self.tokenizer.decode(row[-20:])!r}: its weights are damaged, or its "
                    "training diverged. Evaluate an earlier checkpoint."
                )
            found.append(Scored(total, bool(right.all())))
        return found


def scores_of(head: nn.Module, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, D] and [rows] -> the log-probability of each target in float32, and whether it is the likeliest token, both [rows]."""
    found, chunk_size = [], chunk_rows(head.vocab_size, hidden_states.is_cuda)
    for chunk, wanted in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True):
        logits = head.whole_logits(head(chunk))
        found.append((-head.scores(logits, wanted).token_losses(), logits.argmax(dim=-1) == wanted))
    log_probs, likeliest = zip(*found, strict=True)
    return torch.cat(log_probs), torch.cat(likeliest)
