"""Chapter 03. Span corruption, T5's denoising task: cut spans out of a text and have an encoder-decoder write what was in them.

Each span becomes one sentinel token, another one for each span, so the encoder reads less than the whole text and the decoder
writes only the spans (Raffel et al. 2019, section 3.1.4):

    text     Thank you for inviting me to your party last week
    input    Thank you <X> me to your party <Y> week <END>
    target   <X> for inviting <Y> last <END>

15 % of the tokens are cut out, in spans of 3 on average. The paper's figure ends the target with one more sentinel; the
released code, where a text always ends within a span, does not, and neither does this.

A pair is a text that is read and one that is written. The decoder reads its own target one position late, behind a start token, so that
position i predicts target i from the targets before it (teacher forcing). Rows are filled up to the longest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.course.binding import exercise
from shared.course.bounds import Bounds, Fraction, checked
from shared.loss import IGNORED
from shared.totals import Batch


def pair_batch(pairs: Sequence[tuple[Tensor, Tensor]], start_id: int) -> Batch:
    """A batch of (read, written) pairs.

    Args:
        pairs: one or more of ([n] int64, [m] int64), each with its end token.
        start_id: what the decoder reads first; T5 takes its padding token.

    Returns:
        `input_ids` [batch, N] and `valid` [batch, N] bool, False on padding; `decoder_input_ids` [batch, M], the targets
        one position later, the start token first; `targets` [batch, M], -100 on padding. Ids are int64, padding is 0.
    """
    if not pairs or any(len(text) == 0 for pair in pairs for text in pair):
        raise ValueError("A batch of pairs needs at least one pair, and each text at least its end token.")
    read, written = zip(*pairs, strict=True)
    lengths = torch.tensor(list(map(len, read)))
    late = [torch.cat([text.new_tensor([start_id]), text[:-1]]) for text in written]
    input_ids = pad_sequence(read, batch_first=True)
    return {
        "input_ids": input_ids,
        "valid": torch.arange(input_ids.shape[1]) < lengths[:, None],
        "decoder_input_ids": pad_sequence(late, batch_first=True),
        "targets": pad_sequence(written, batch_first=True, padding_value=IGNORED),
    }


@exercise("03.corrupt_spans")
def corrupt_spans(input_ids: Tensor, noise: Tensor, sentinels: Sequence[int], end_id: int) -> tuple[Tensor, Tensor]:
    """Replace each span by a sentinel, and collect the spans behind their sentinels (Raffel et al. 2019, figure 2).

    A span is a run of neighbouring noise tokens, as long as it goes. The first span gets sentinels[0], the second sentinels[1], ...

    Args:
        input_ids: [n] int64, without an end token.
        noise: [n] bool, True for the tokens that are cut out.
        sentinels: token ids that stand nowhere else. T5's count downwards from the last id of its vocabulary.
        end_id: ends both results.

    Returns:
        inputs: [...] int64: the text with one sentinel in place of each span, and the end token.
        targets: [...] int64: for each span its sentinel and its tokens, and the end token.

    Raises:
        ValueError: there are more spans than sentinels.

    >>> noise = torch.tensor([False, True, True, False, True])
    >>> corrupt_spans(torch.tensor([11, 12, 13, 14, 15]), noise, sentinels=[99, 98, 97], end_id=1)
    (tensor([11, 99, 14, 98,  1]), tensor([99, 12, 13, 98, 15,  1]))
    """


@dataclass(frozen=True)
@checked
class SpanConfig:
    """Which share of the tokens is cut out, and how long a span is on average."""

    density: Fraction = 0.15
    mean_length: Annotated[float, Bounds(ge=1)] = 3.0

    def counts(self, length: int) -> tuple[int, int]:
        """How many tokens of a text of `length` are cut out, and in how many spans."""
        if length < 2:
            raise ValueError(f"A text of {length} tokens cannot lose a span: give at least 2 tokens.")
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = min(max(round(noise / self.mean_length), 1), length - noise)
        return noise, spans

    def sizes(self, length: int) -> tuple[int, int]:
        """The lengths of input and target that a text of `length` tokens becomes, end tokens included."""
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def raw_length(self, inputs: int) -> int:
        """The longest text whose input has at most `inputs` tokens: 512 for T5's, which takes texts of 568."""
        length = 2
        if self.sizes(length)[0] > inputs:
            raise ValueError(f"An input of {inputs} tokens is too short: the shortest text needs {self.sizes(length)[0]}.")
        while self.sizes(length + 1)[0] <= inputs:
            length += 1
        return length


def random_spans(length: int, config: SpanConfig, generator: Generator) -> Tensor:
    """[length] bool: T5's random spans. Kept and cut-out runs take turns, a kept one first; all lengths are equally likely."""
    noise, spans = config.counts(length)
    kept_runs, noise_runs = random_parts(length - noise, spans, generator), random_parts(noise, spans, generator)
    runs = torch.stack([kept_runs, noise_runs], dim=1).flatten()
    return torch.tensor([False, True]).repeat(spans).repeat_interleave(runs)


def random_parts(total: int, parts: int, generator: Generator) -> Tensor:
    """[parts] int64: `total` as a sum of that many positive numbers, each way of doing so equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: parts - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([total]))


@dataclass(frozen=True)
class SpanCorruption:
    """Turns texts into pairs for an encoder-decoder: `task(ids, generator) -> (inputs, targets)`, with new spans each time.

    Args:
        sentinels: token ids that stand nowhere else.
        end_id: the end token.
    """

    config: SpanConfig
    sentinels: Sequence[int]
    end_id: int

    def __call__(self, ids: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Args:
            ids: [n] int64, a text of at least 2 tokens, with its end token or without.
        """
        body = ids[:-1] if len(ids) and ids[-1] == self.end_id else ids
        return corrupt_spans(body, random_spans(len(body), self.config, generator), self.sentinels, self.end_id)
