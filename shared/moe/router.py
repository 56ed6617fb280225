"""Chapter 09. Router (gate): scores every expert for every token, chooses the top k, and weights them.

    scores = softmax(W x) or sigmoid(W x)      experts = top k of (scores + bias)      weights = scores of those [/ their sum] * factor

The gradient reaches W through the weights alone; which experts are chosen has none. The bias (Wang et al. 2024, auxiliary-loss-free load
balancing) moves the choice and never the weights. All of it is computed in float32 with autocast off: in 16 bits two
experts with close scores tie or change places (Fedus et al. 2021, section 2.4).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.config import ModelConfig


class Routing(NamedTuple):
    """What a router decides for [batch, seq] tokens.

    logits: [batch, seq, E]. probabilities: [batch, seq, E], the scores, each token's divided by their sum. weights: [batch, seq, k].
    experts: [batch, seq, k] int64.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor


def top_k_routing(
    scores: Tensor, k: int, normalize: bool, scaling: float = 1.0, bias: Tensor | None = None, groups: int = 1, best_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Choose the k best experts for each token, and how much each of them counts.

    Args:
        scores: [..., E], not negative.
        k: how many experts are chosen.
        normalize: divide the weights by their sum (of the k chosen ones).
        scaling: multiplies the weights after that.
        bias: [E], added to the scores for the choice alone; the weights are made of the scores without it. None for 0.
        groups: the experts stand in this many groups of equal size, in order.
        best_groups: only experts of this many groups may be chosen: those with the largest sums of their two best (biased) scores. With
            one group there is nothing to choose.

    Returns:
        weights: [..., k], with a gradient to the scores; the largest (biased) score first.
        experts: [..., k] int64.

    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=True)
    (tensor([0.6250, 0.3750]), tensor([1, 2]))
    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=False, bias=torch.tensor([0.4, 0.0, 0.0]))
    (tensor([0.2000, 0.5000]), tensor([0, 1]))
    """
    choice = scores.detach() if bias is None else scores.detach() + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2).values.sum(dim=-1).topk(best_groups).indices
        open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(k).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)  # sigmoids may all be 0
    return weights * scaling, experts


class Router(nn.Module):
    """[batch, seq, D] -> `Routing`.

    Attributes:
        weight: [E, D].
        bias: [E], frozen: no gradient moves it, `shared.moe.balancing` does. None without `bias_update_rate`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.experts = experts = config.experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, config.hidden_size))
        self.weight.full_precision = True
        biased = experts.bias_update_rate is not None
        self.bias = nn.Parameter(torch.zeros(experts.num_experts), requires_grad=False) if biased else None
        if biased:
            self.bias.full_precision = True

    def forward(self, x: Tensor) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            scores = logits.softmax(dim=-1) if self.experts.scoring == "softmax" else logits.sigmoid()
            weights, chosen = top_k_routing(
                scores,
                self.experts.num_experts_per_tok,
                self.experts.norm_topk_prob,
                self.experts.routed_scaling_factor,
                None if self.bias is None else self.bias.to(dtype),
                self.experts.n_group,
                self.experts.topk_group,
            )
            probabilities = scores if self.experts.scoring == "softmax" else F.normalize(scores, p=1, dim=-1)
        return Routing(logits, probabilities, weights, chosen)
