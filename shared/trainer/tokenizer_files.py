"""Chapter 12. A tokenizer in the files that transformers reads beside a model's weights."""

import json
from pathlib import Path

from shared.data.tokenizer import TextTokenizer


def save_tokenizer(tokenizer: TextTokenizer, folder: Path, longest: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, so that `AutoTokenizer.from_pretrained(folder)` gives the same ids.

    Args:
        longest: tokens that the model takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
