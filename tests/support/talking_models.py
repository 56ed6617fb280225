"""A small model with random weights, its tokenizer and perhaps a chat template, in Hugging Face's format."""

from pathlib import Path

import torch
from chat_templates import save_tokenizer

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.template import ChatTemplate
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}


def save_model(folder: Path, template: str | None = None, context: int = 160) -> Path:
    """Its folder. template: of its answers, such as "chatml"."""
    torch.manual_seed(0)
    vocabulary = TextTokenizer.load(save_tokenizer(folder)).vocab_size
    save_pretrained(TransformerModel(ModelConfig(vocab_size=vocabulary, max_position_embeddings=context, **SIZES)), folder)
    if template:
        ChatTemplate.load(template).save(folder)
    return folder
