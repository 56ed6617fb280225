"""Chapter 09. Layer builders for mixtures of experts: `TransformerModel(config, MIXTURE)`, `load_pretrained(folder, builders=MIXTURE)`.

They also build the parts that a configuration names by import path (`model.parts`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import shared.moe.hf  # noqa: F401 (who builds such models also reads their files)
from shared.model.attention import Attention
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.feed_forward import build_feed_forward
from shared.model.norm import build_norm
from shared.model.transformer import PLAIN
from shared.moe.layer import MixtureLayer


def build_mixture(config: ModelConfig, builders: Builders, layer: int) -> nn.Module:
    """A feed-forward builder for any model: experts where the configuration has them, and the dense layer elsewhere."""
    if config.experts is None or not config.experts.is_sparse(layer):
        return build_feed_forward(replace(config, experts=None), builders, layer)
    return MixtureLayer(config, builders, layer)


CALLED_WITH = {
    "norm": ("config", "size"),
    "attention": ("config", "builders", "layer", "cross"),
    "feed_forward": ("config", "builders", "layer"),
}


def own_part(config: ModelConfig, kind: str) -> Callable[..., nn.Module] | None:
    """The builder of a part by import path, or None where the configuration names none."""
    extension = getattr(getattr(config, "parts", None), kind, None)
    return extension and extension.bound(f"model.parts.{kind}", *CALLED_WITH[kind])


def build_part(kind: str, default: Callable[..., nn.Module], config: ModelConfig, *arguments: Any) -> nn.Module:
    return (own_part(config, kind) or default)(config, *arguments)


MIXTURE = replace(
    PLAIN,
    norm=partial(build_part, "norm", build_norm),
    attention=partial(build_part, "attention", Attention),
    feed_forward=partial(build_part, "feed_forward", build_mixture),
)
