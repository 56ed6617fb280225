"""Chapter 02. RoPE's part of a `config.json`, which transformers 4 and 5 write differently.

Version 5: `rope_parameters`, with `rope_type` ("default" for none) and `rope_theta` inside. Version 4: `rope_theta` beside
`rope_scaling`, whose kind is called `rope_type` or, earlier still, `type`.
"""

from typing import Any

from shared.model.config import ModelConfig, RopeScaling
from shared.model.hf.format import Told

OPTIONS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
HARMLESS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}


def read_rope(told: Told, longest: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for a `ModelConfig`. longest: max_position_embeddings.

    Raises:
        ValueError: a kind of scaling, or an option of one, that is not understood here.
    """
    said = told.get("rope_parameters") or told.get("rope_scaling") or {}
    theta = float(said.get("rope_theta") or told.get("rope_theta") or 10000.0)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in OPTIONS:
        raise ValueError(f"rope_type {kind!r} is not one of this model's: default, {', '.join(OPTIONS)}.")
    given = {key: value for key, value in said.items() if value is not None}
    if strange := sorted(set(given) - set(OPTIONS[kind]) - HARMLESS):
        raise ValueError(f"{kind} RoPE scaling with {', '.join(strange)} is not understood here.")
    options = {key: given[key] for key in OPTIONS[kind] if key in given}
    if kind == "yarn":
        options.setdefault("original_max_position_embeddings", longest)
    return {"rope_theta": theta, "rope_scaling": RopeScaling(kind, **options)}


def write_rope(config: ModelConfig) -> Told:
    """`rope_parameters`, as transformers 5 writes it."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    options = {key: getattr(scaling, key) for key in OPTIONS[scaling.rope_type] if getattr(scaling, key) is not None}
    return {"rope_parameters": {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta} | options}
