"""Chapter 12. The model that is evaluated: a run, a checkpoint or a folder of Hugging Face's format, with tokenizer and template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.devices import pick_device
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.template import ChatTemplate, spelt
from shared.model.hf.files import read_json
from shared.model.transformer import TransformerModel
from shared.trainer.evaluation.likelihood import LikelihoodScorer
from shared.trainer.talk.chat import AnswerSettings, open_talk


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated.

    path: as it was named. template: None for one without. stops: ids that end an answer.
    """

    path: Path
    model: TransformerModel
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    stops: frozenset[int]
    scorer: LikelihoodScorer

    def encode(self, text: str) -> list[int]:
        """The ids of a text, behind the token that the tokenizer puts before one, if it does."""
        return self.tokenizer.tokenizer.encode(text, add_special_tokens=True).ids

    def chat_prompt(self, shots: Sequence[tuple[str, str]], prompt: str) -> list[int]:
        """The ids of a user's turn behind other turns, up to where the answer begins. Spaces around a prompt are left out."""
        turns = [turn for asked, answer in shots for turn in (("user", asked), ("assistant", answer))]
        messages = [{"role": role, "content": text.strip()} for role, text in [*turns, ("user", prompt)]]
        return ChatEncoder(self.tokenizer).prompt(self.template, messages)


def open_subject(path: Path, batch_tokens: int = 4096, device: str = "auto", precision: str = "float32") -> Subject:
    """The model of a run, a checkpoint or a folder.

    Args:
        batch_tokens: positions that are computed at a time.
        device: auto, cpu, cuda or mps.
        precision: of the weights: float32, or bfloat16, which takes half of the memory.
    """
    talk = open_talk(path, AnswerSettings(), None)
    model, tokenizer = talk.model, talk.tokenizer
    if model.config.architecture != "decoder":
        raise CourseError(f"{path} is an {model.config.architecture}: likelihoods of text are those of a decoder. Give another model.")
    model.to(device=pick_device(device), dtype=getattr(torch, precision))
    return Subject(
        path, model, tokenizer, talk.template, frozenset(talk.stops),
        LikelihoodScorer(model, tokenizer, prefix_of(path, tokenizer), batch_tokens),
    )  # fmt: skip


def prefix_of(path: Path, tokenizer: TextTokenizer) -> int:
    """The token before a text's first: the tokenizer's beginning of a text, else its end."""
    for folder in (path, path / "model", path / "tokenizer", path / "adapter"):
        if (folder / "tokenizer_config.json").is_file():
            name = spelt(read_json(folder / "tokenizer_config.json").get("bos_token"))
            return tokenizer.special_ids.get(name, tokenizer.end_id)
    return tokenizer.end_id
