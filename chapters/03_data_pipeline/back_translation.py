"""Back-translation: pairs for a translator, made from texts that nobody has translated.

Texts in the language that is written are plentiful, translations are not. So a model that translates backwards, from the target
language into the source language, gives each text a source (Sennrich et al. 2016, "Improving Neural Machine Translation Models with
Monolingual Data", section 3.2). The synthetic source may be wrong; the target is real, and it is the target that is learned to be
written. A tag in front of synthetic sources lets the model tell the two kinds apart (Caswell et al. 2019). The same with one
language on both sides makes paraphrases, and with a code model descriptions of functions: any translator will do.

Left out on purpose: fast generation (chapter 12 brings a cache), and sampling, which gives more varied sources than the likeliest words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shared.data.spans import pair_batch
from shared.model.masks import Padding
from shared.model.transformer import TransformerModel

TAG = "<bt>"


class Translator(Protocol):
    """Anything that turns texts into texts, one for each: a model of ours, a published one, a service."""

    def __call__(self, texts: Sequence[str]) -> list[str]: ...


class Pair(NamedTuple):
    """A text to read and the text to write for it. `synthetic`: the first was made by a translator."""

    source: str
    target: str
    synthetic: bool = False


@dataclass(frozen=True)
class BackTranslated:
    """The pairs that came out, and the targets that gave none: (target, reason)."""

    pairs: list[Pair]
    dropped: list[tuple[str, str]]


def back_translate(targets: Sequence[str], backward: Translator, tag: str = TAG, batch_size: int = 256) -> BackTranslated:
    """A synthetic source for each target text.

    Args:
        targets: real texts in the target language.
        backward: translates from the target language into the source language.
        tag: a word that is put in front of each synthetic source; "" for none.
        batch_size: how many texts the translator is given at a time.

    Returns:
        One pair for each target, in order, but for those whose translation is empty or the target itself.

    Raises:
        ValueError: the translator did not return one text for each.
    """
    pairs, dropped = [], []
    for start in range(0, len(targets), batch_size):
        chunk = targets[start : start + batch_size]
        sources = backward(chunk)
        if len(sources) != len(chunk):
            raise ValueError(f"The translator returned {len(sources)} texts for {len(chunk)}: it must give one for each, in their order.")
        for source, target in zip(sources, chunk, strict=True):
            if not source.strip():
                dropped.append((target, "the translation is empty"))
            elif source.strip() == target.strip():
                dropped.append((target, "the translation is the text itself"))
            else:
                pairs.append(Pair(f"{tag} {source}".strip(), target, synthetic=True))
    return BackTranslated(pairs, dropped)


class Vocabulary(Protocol):
    """What turns a text into ids and back. `start_id` is what a decoder reads first; it may be the end token."""

    start_id: int
    end_id: int

    def encode(self, text: str) -> Tensor:
        """[tokens] int64, the end token last."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the first end token."""


def encoded(pairs: Sequence[Pair], vocabulary: Vocabulary) -> list[tuple[Tensor, Tensor]]:
    """The pairs as ids, for `shared.data.spans.pair_batch`."""
    return [(vocabulary.encode(pair.source), vocabulary.encode(pair.target)) for pair in pairs]


@dataclass(frozen=True)
class GreedyTranslator:
    """A translator by chapter 02's encoder-decoder, which writes the likeliest token each time.

    longest: tokens after which a text is cut off.
    """

    model: TransformerModel
    vocabulary: Vocabulary
    longest: int = 16

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Raises:
        ValueError: a word that the vocabulary lacks.
        """
        if not texts:
            return []
        empty = torch.tensor([self.vocabulary.end_id])
        read = pair_batch([(self.vocabulary.encode(text), empty) for text in texts], self.vocabulary.start_id)
        written = self.write(read["input_ids"], Padding(read["valid"]))
        return [self.vocabulary.decode(row) for row in written.tolist()]

    def write(self, input_ids: Tensor, valid: Padding) -> Tensor:
        """[batch, T] ids -> [batch, at most longest] ids; what stands behind a row's end token means nothing."""
        was_training = self.model.training
        self.model.eval()
        written = torch.full((len(input_ids), 1), self.vocabulary.start_id)
        while written.shape[1] <= self.longest and not (written[:, 1:] == self.vocabulary.end_id).any(dim=1).all():
            logits = self.model(input_ids, decoder_input_ids=written, encoder_mask=valid, cross_mask=valid)
            written = torch.cat([written, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
        self.model.train(was_training)
        return written[:, 1:]
