"""`ModelConfig.experts`: chapter 09 fills counts, FLOPs and layers by deriving from `ExpertsConfig`, and nothing here ignores them."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shared.engine.metrics.flops import flops_per_token, model_flops_per_token
from shared.model.builders import Builders
from shared.model.config import ExpertsConfig, ModelConfig
from shared.model.counting import count_parameters, parameter_counts
from shared.model.feed_forward import GatedFeedForward, build_feed_forward
from shared.model.hf.registry import write_config
from shared.model.transformer import PLAIN, TransformerModel
from shared.parallel.planning.activations import require_formula
from shared.trainer.settings import parse_text

DENSE = ModelConfig(vocab_size=29, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24)


@dataclass(frozen=True)
class FirstExpert(ExpertsConfig):
    """Gated experts of half the width after a dense first layer; each token passes as many as this says."""

    num_experts_per_token: int = 2

    def width(self, config: ModelConfig, layer: int) -> int:
        return 3 * config.hidden_size * config.intermediate_size if layer == 0 else 3 * config.hidden_size * config.intermediate_size // 2

    def parameter_counts(self, config: ModelConfig, layer: int) -> dict[str, int]:
        if layer == 0:
            return {"matrix": self.width(config, 0)}
        return {"matrix": config.hidden_size * self.num_experts, "expert": self.num_experts * self.width(config, layer)}

    def active_matrix_size(self, config: ModelConfig, layer: int) -> int:
        if layer == 0:
            return self.width(config, 0)
        return config.hidden_size * self.num_experts + self.num_experts_per_token * self.width(config, layer)


class Routed(nn.Module):
    """The first experts for every token, which costs what any choice costs."""

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        narrow = replace(config, experts=None, intermediate_size=config.intermediate_size // 2)
        self.router = nn.Linear(config.hidden_size, config.experts.num_experts, bias=False)
        self.experts = nn.ModuleList(GatedFeedForward(narrow, builders) for _ in range(config.experts.num_experts))
        self.chosen = config.experts.num_experts_per_token

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(dim=-1)
        return sum(shares[..., i, None] * self.experts[i](x) for i in range(self.chosen))


def feed_forward(config: ModelConfig, builders: Builders, layer: int) -> nn.Module:
    return build_feed_forward(replace(config, experts=None), builders, layer) if layer == 0 else Routed(config, builders)


SPARSE = replace(DENSE, experts=FirstExpert(4))


def test_experts_are_counted_by_layer_and_role():
    model = TransformerModel(SPARSE, replace(PLAIN, feed_forward=feed_forward))
    assert parameter_counts(SPARSE) == count_parameters(model)
    assert parameter_counts(SPARSE)["expert"] == 2 * 4 * 3 * 16 * 12


@pytest.mark.parametrize("chosen", [1, 3])
def test_flops_count_only_the_active_experts(chosen):
    config = replace(SPARSE, experts=FirstExpert(4, num_experts_per_token=chosen), attention="eager")
    model, seq = TransformerModel(config, replace(PLAIN, feed_forward=feed_forward)), 8
    ids = torch.arange(2 * seq).view(2, seq)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == 2 * seq * model_flops_per_token(config, seq)


def test_a_dense_model_has_the_flops_of_the_formula():
    assert model_flops_per_token(DENSE, 8) == flops_per_token(DENSE, 8)


@dataclass
class Settings:
    model: ModelConfig = field(default_factory=ModelConfig)


def test_experts_without_a_chapter_are_refused_in_python_and_in_yaml():
    with pytest.raises(ValueError, match="experts come with chapter 09"):
        replace(DENSE, experts=ExpertsConfig(4))
    with pytest.raises(ValueError, match="experts come with chapter 09"):
        parse_text(Settings, "model:\n  experts:\n    num_experts: 4\n")
    assert parse_text(Settings, "model:\n  experts: null\n").model.experts is None


def test_nothing_that_does_not_know_experts_ignores_them():
    with pytest.raises(ValueError, match="give the builder of chapter 09"):
        TransformerModel(SPARSE)
    with pytest.raises(ValueError, match="would lose: experts FirstExpert"):
        write_config(SPARSE)
    with pytest.raises(ValueError, match="no formula .* this experts"):
        require_formula(SPARSE.resolved())
    with pytest.raises(ValueError, match="at least 1"):
        ExpertsConfig(0)


def test_a_configuration_of_a_later_chapter_compares_with_one_of_this():
    @dataclass(frozen=True)
    class Later(ModelConfig):
        experts: FirstExpert | None = None
        latent_size: int | None = None

    later = Later(**vars(DENSE) | {"latent_size": 8})
    assert later.differences(DENSE) == {"latent_size": (8, None)} == {k: v[::-1] for k, v in DENSE.differences(later).items()}
    with pytest.raises(ValueError, match="would lose: latent_size 8"):
        write_config(later)
