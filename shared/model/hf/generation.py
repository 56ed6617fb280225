"""Chapter 02. Special token ids (`eos_token_id` and others) of `config.json` and `generation_config.json`: where transformers' `generate`
begins and stops.

What a file does not say, transformers fills in with the defaults of its classes, such as 2 for the end token of every LLaMA: text then
stops at an ordinary token, or never. So each id is written, and one that a model does not have is null.
"""

from collections.abc import Mapping
from pathlib import Path

from shared.model.config import ModelConfig
from shared.model.hf.files import read_json, write_json
from shared.model.hf.format import ConfigJson, Format

TokenIds = Mapping[str, int | list[int] | None]
GENERATION = "generation_config.json"
KEYS = ("eos_token_id", "bos_token_id", "pad_token_id")
START = "decoder_start_token_id"  # of an encoder-decoder


def read_token_ids(known: Format, folder: Path, raw: ConfigJson) -> dict[str, int | list[int] | None]:
    """The ids that a folder gives: in generation_config.json, in its config.json (`raw`), or by what transformers assumes in its format.

    Raises:
        PretrainedError: generation_config.json cannot be read.
    """
    said = raw | (read_json(folder / GENERATION) if (folder / GENERATION).exists() else {})
    return {key: said.get(key, known.token_ids.get(key)) for key in (*KEYS, START) if key != START or START in said}


def require_token_ids(token_ids: TokenIds, config: ModelConfig) -> None:
    """Raise ValueError for an id that the model does not have, and for a name that is neither in KEYS nor START."""
    for key, value in token_ids.items():
        if key not in (*KEYS, START):
            raise ValueError(f"token_ids has {key!r}: give {', '.join(KEYS)} or {START}.")
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not 0 <= number < config.vocab_size:
                raise ValueError(f"{key} is {value}, and the model's ids are 0 to {config.vocab_size - 1}.")


def every_id(token_ids: TokenIds, config: ModelConfig) -> ConfigJson:
    """The ids as the files have them. An encoder-decoder starts with padding, as T5 does, unless something else is given."""
    ids = dict.fromkeys(KEYS) | dict(token_ids)
    return {START: ids["pad_token_id"]} | ids if config.architecture == "encoder-decoder" else ids


def write_generation(folder: Path, ids: ConfigJson, config: ModelConfig) -> None:
    """Write generation_config.json: the ids, and the longest text that the model takes. An encoder generates nothing and has none."""
    if config.architecture == "encoder":
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        write_json(folder / GENERATION, ids | {"max_length": config.max_position_embeddings})
