"""Chapter 10. Answers of a fine-tuned model: greedy generation behind prompts, up to a token that ends an answer.

Many prompts are answered at once where they are equally long: rows of one length need no padding, so no position and no mask differs from
a prompt alone.

Left out on purpose: keeping keys and values between tokens (chapter 12), and batches of prompts of several lengths.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from shared.finetune.soft_prompts import virtual_ids
from shared.model.transformer import TransformerModel
from shared.sampling import evaluating, generate

ROWS = 64  # answered at a time


class AnsweringModel(nn.Module):
    """A model that continues [batch, seq] ids, whatever stands before them: virtual tokens, or what an encoder has read.

    Args:
        model: a decoder or an encoder-decoder, whole, perhaps with adapters.
        read: [batch, N] ids of an encoder; None for a decoder.
    """

    def __init__(self, model: TransformerModel, read: Tensor | None = None):
        super().__init__()
        self.model, self.read, self.before = model, read, virtual_ids(model)

    def forward(self, ids: Tensor) -> Tensor:
        if self.read is not None:
            return self.model(self.read, decoder_input_ids=ids)
        first = ids.new_tensor(self.before).expand(len(ids), -1)
        return self.model(torch.cat([first, ids], dim=1), head_fn=last_logits)


def last_logits(head: nn.Module, hidden_states: Tensor) -> Tensor:
    """[batch, seq, D] -> [batch, 1, vocab]: the logits of the last position, which are all that the next token needs."""
    return head.whole_logits(head(hidden_states[:, -1:]))


def answer_all(
    model: TransformerModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    context: int,
    stops: Collection[int],
    start_id: int | None = None,
) -> list[list[int]]:
    """The likeliest answer to each prompt, up to the first token of `stops`, without it.

    Args:
        new_tokens: at most, for each.
        context: how many of the last tokens the model is shown.
        start_id: what the decoder of an encoder-decoder reads first, which reads the prompt with its encoder; None for a decoder.
    """
    found: list[list[int]] = [[] for _ in prompts]
    lengths: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(number)
    with evaluating(model):
        for some in (same[first : first + ROWS] for same in lengths.values() for first in range(0, len(same), ROWS)):
            ids = torch.tensor([list(prompts[number]) for number in some], device=next(model.parameters()).device)
            answering = AnsweringModel(model, None if start_id is None else ids).eval()
            begin = ids if start_id is None else torch.full_like(ids[:, :1], start_id)
            open_rows = set(some)
            for drawn in generate(answering, begin, new_tokens, context=context - len(answering.before), temperature=0.0):
                for number, token in zip(some, drawn.tolist(), strict=True):
                    if number in open_rows and token in stops:
                        open_rows.remove(number)
                    elif number in open_rows:
                        found[number].append(token)
                if not open_rows:
                    break
    return found
