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

from shared.course.binding import exercise
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


@exercise("09.top_k_routing")
def top_k_routing(
    scores: Tensor, k: int, normalize: bool, scaling: float = 1.0, bias: Tensor | None = None, groups: int = 1, best_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Top-k routing: choose the k best experts for each token, and say how much each of them counts.

    An expert is chosen by its score plus its bias, and counts by its score alone:

        - The k experts with the largest biased scores are chosen, each at most once. Of equal ones, either may be.
        - A chosen expert's weight is its score without the bias. The bias has no gradient, and changes no digit of a weight.
        - With `normalize`, a token's weights are divided by their sum, however small, and then add up to 1. Sigmoids can all be rounded to
          0: weights that are all 0 stay 0.
        - `scaling` multiplies the weights after that.
        - With groups, each group has E / groups consecutive experts. A token chooses only among the experts of the
          `best_groups` best groups. A group is as good as the sum of its two largest biased scores, which may be negative
          (DeepSeek-V3, section 2.1.2).

    No loop runs over tokens.

    Args:
        scores: [..., E], at least 0.
        k: at least 1, at most the number of experts that a token may choose from.
        normalize: whether a token's weights add up to 1.
        scaling: multiplies the weights.
        bias: [E], or None for 0.
        groups: a divisor of E; with several, each has two experts or more.
        best_groups: at most `groups`.

    Returns:
        weights: [..., k] in the dtype of `scores`, with a gradient to the scores. The expert with the largest biased score comes first.
        experts: [..., k] int64.

    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=True)
    (tensor([0.6250, 0.3750]), tensor([1, 2]))
    >>> top_k_routing(torch.tensor([0.2, 0.5, 0.3]), k=2, normalize=False, bias=torch.tensor([0.4, 0.0, 0.0]))
    (tensor([0.2000, 0.5000]), tensor([0, 1]))
    """


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
