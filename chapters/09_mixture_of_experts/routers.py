"""Two other routers, for history and for contrast: noisy top-k (Shazeer et al. 2017) and expert choice (Zhou et al. 2022).

**Noisy top-k** adds noise to the logits before the choice, so that an expert that was never chosen is tried now and then:

    H(x) = W x + normal noise * softplus(W_noise x)        weights = softmax over the k largest of H(x)

**Expert choice** turns the choice around: not a token chooses experts, an expert chooses tokens. Every expert takes equally many, so
nothing has to balance them. Whether a token is taken depends on the tokens that it competes with, later ones too: the layer is not causal.
A model trained with it has seen a little of the future, and cannot generate.

Neither is a setting of `model.experts`. Noise is drawn for the tokens of a process, so a run on two ranks is not the run on one; and
what is not causal has no place in a language model. `experiments.py` and the tests put them in place of a layer's router.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext
from shared.moe.layer import MixtureLayer, mixture_layers
from shared.moe.router import Router, Routing, top_k_routing


class NoisyTopKRouter(Router):
    """Shazeer et al. 2017, section 2.1, equations 3 to 5: [batch, seq, D] -> `Routing`. Evaluation adds no noise.

    Attributes:
        noise_weight: [E, D], begins at 0, where every logit's noise has a standard deviation of ln 2.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.noise_weight = nn.Parameter(torch.zeros_like(self.weight))
        self.noise_weight.full_precision = True

    def forward(self, x: Tensor) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            if self.training:
                logits = logits + torch.randn_like(logits) * F.softplus(F.linear(x.to(dtype), self.noise_weight.to(dtype)))
            probabilities = logits.softmax(dim=-1)
            weights, experts = top_k_routing(probabilities, self.experts.num_experts_per_tok, normalize=True)
        return Routing(logits, probabilities, weights, experts)


def expert_choice(probabilities: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Each expert's best tokens (Zhou et al. 2022, section 3.2), row by row.

    Args:
        probabilities: [batch, seq, E], each token's adding up to 1.
        capacity: how many tokens of a row an expert takes.

    Returns:
        weights: [batch, E, capacity], the probabilities, with their gradient.
        tokens: [batch, E, capacity] int64, the places in the row.

    >>> expert_choice(torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]]), capacity=1)
    (tensor([[[0.9000],
             [0.8000]]]), tensor([[[0],
             [2]]]))
    """
    best = probabilities.transpose(1, 2).topk(capacity)
    return best.values, best.indices


class ExpertChoiceLayer(MixtureLayer):
    """A mixture layer in which experts choose: each takes capacity_factor * k * seq / E tokens of a row, so a token has k on average.
    It has no losses, because every expert's load is the same. It computes in training mode alone.

    Raises:
        SettingError: in evaluation mode, in which a result must not depend on later tokens.
    """

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        if not self.training:
            raise SettingError(
                "Experts that choose their tokens look at later tokens too: such a model cannot be evaluated as a language model "
                "or generate. Take a router in which tokens choose."
            )
        batch, seq, size = x.shape
        config = self.config
        share = (config.capacity_factor or 1.0) * config.num_experts_per_tok * seq / config.num_experts
        weights, tokens = expert_choice(self.router(x).probabilities, min(math.ceil(share), seq))
        chosen = (tokens + seq * torch.arange(batch, device=x.device).view(-1, 1, 1)).transpose(0, 1).flatten()  # expert by expert
        counts = torch.full((config.num_experts,), len(chosen) // config.num_experts, device=x.device)
        rows = self.experts(x.flatten(0, 1)[chosen], counts)
        y = torch.zeros(batch * seq, size, dtype=torch.promote_types(rows.dtype, weights.dtype), device=x.device)
        y = y.index_add(0, chosen, rows * weights.transpose(0, 1).reshape(-1, 1)).view(batch, seq, size).to(x.dtype)
        return y if self.shared_experts is None else y + self.shared_experts(x)


@torch.no_grad()
def use_noisy_routers(model: nn.Module, config: ModelConfig) -> None:
    """Put a noisy router in place of every router of `model`, with its weight. `config`: the model's."""
    for layer in mixture_layers(model):
        noisy = NoisyTopKRouter(config).to(layer.router.weight)
        noisy.weight.copy_(layer.router.weight)
        layer.router = noisy


def use_expert_choice(model: nn.Module) -> None:
    """Let the experts of every mixture layer of `model` choose their tokens. Weights and names stay."""
    for layer in mixture_layers(model):
        layer.__class__ = ExpertChoiceLayer
