"""Chapter 02. Registry of Hugging Face formats (`model_type`), and which of them can hold a configuration."""

from dataclasses import replace

from shared.course.errors import SettingError
from shared.model.config import ModelConfig
from shared.model.hf.classic import BERT, BLOOM, GPT2, T5
from shared.model.hf.format import ConfigJson, Format
from shared.model.hf.llama import LLAMA, MISTRAL, QWEN2, QWEN3

FORMATS: dict[str, Format] = {known.model_type: known for known in (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, BERT, T5, BLOOM)}
QUANTIZED = (
    "quantization_config is not null: load_quantized (shared.finetune.quantization.packed_files) reads GPTQ's and AWQ's files, open_nf4 "
    "(nf4_files, beside it) bitsandbytes' 4 bits; or give the model that it was made from."
)
OF_TRAINING = {"attention": "sdpa", "hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.02}


def read_config(raw: ConfigJson) -> tuple[Format, ModelConfig]:
    """The format and the configuration that a `config.json` describes.

    Raises:
        ValueError: a model_type that is not known here, a key that is missing, or one that asks for what is not built here.
    """
    model_type = raw.get("model_type")
    if model_type not in FORMATS:
        raise ValueError(f"model_type {model_type!r} is not known here. These are: {', '.join(FORMATS)}.")
    known = FORMATS[model_type]
    for key, allowed in known.required.items():
        if raw.get(key, allowed[0]) not in allowed:
            if key == "quantization_config":
                raise ValueError(QUANTIZED)
            raise ValueError(f"{key} is {raw[key]!r}: of {model_type} models, only those with {allowed[0]!r} are built here.")
    try:
        return known, known.read(raw)
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing, and a {model_type} model cannot be built without it.") from None


def write_config(config: ModelConfig, model_type: str | None = None) -> tuple[Format, ConfigJson]:
    """The format that describes this model, and its `config.json`.

    Args:
        config: the model.
        model_type: which format to take; None for the first one that can say all that the model computes.

    Raises:
        ValueError: the format, or every format, would lose something; it is named.
    """
    if model_type is not None and model_type not in FORMATS:
        raise ValueError(f"model_type {model_type!r} is not known here. These are: {', '.join(FORMATS)}.")
    config = config.resolved()
    lost = {}
    for known in [FORMATS[model_type]] if model_type else FORMATS.values():
        raw = {"model_type": known.model_type, "architectures": [known.architecture]} | known.write(config)
        lost[known.model_type] = lost_fields(config, known.read(raw))
        if not lost[known.model_type]:
            return known, raw
    nearest = min(lost, key=lambda name: len(lost[name]))
    fields = ", ".join(f"{name} {here!r} (it would be {there!r})" for name, (here, there) in lost[nearest].items())
    raise SettingError(f"No {'such' if model_type else 'known'} format can describe this model. {nearest} would lose: {fields}.")


def lost_fields(config: ModelConfig, read_back: ModelConfig) -> dict[str, tuple]:
    """The fields in which two configurations compute something else. How a model is trained or run is no difference."""
    return comparable(config).differences(comparable(read_back))


def comparable(config: ModelConfig) -> ModelConfig:
    """The same computation with every field that has no effect in it at one value."""
    config = config.resolved()
    changes = dict(OF_TRAINING)
    if config.position != "learned" and (config.rope_scaling is None or config.rope_scaling.rope_type != "dynamic"):
        changes["max_position_embeddings"] = 1
    if config.position != "relative":
        changes |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    if config.position != "rope":
        changes["rope_theta"] = 10000.0
    if not config.qk_norm:
        changes["qk_norm_over"] = "head"
    if config.experts is not None:
        changes |= config.experts.comparable(config)
    if "sliding_attention" not in config.layer_types:
        changes["sliding_window"] = None
    return replace(config, **changes)
