"""Chapter 09. Layer builders for mixtures of experts: `TransformerModel(config, MIXTURE)`, `load_pretrained(folder, builders=MIXTURE)`."""

from dataclasses import replace

from torch import nn

import shared.moe.hf  # noqa: F401 (who builds such models also reads their files)
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.feed_forward import build_feed_forward
from shared.moe.layer import MixtureLayer


def build_mixture(config: ModelConfig, builders: Builders, layer: int) -> nn.Module:
    """A feed-forward builder for any model: experts where the configuration has them, and the dense layer elsewhere."""
    if config.experts is None or not config.experts.is_sparse(layer):
        return build_feed_forward(replace(config, experts=None), builders, layer)
    return MixtureLayer(config, builders, layer)


MIXTURE = Builders(feed_forward=build_mixture)
