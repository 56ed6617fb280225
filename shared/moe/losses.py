"""Chapter 09. Auxiliary losses of the router: the load-balancing loss and the router z-loss, as sums over tokens.

A router left alone sends most tokens to a few experts, which then learn most: it collapses. The balance loss (Fedus et al. 2021, Switch
Transformers, equation 4) multiplies the share f_i of a row's choices that went to expert i, which has no gradient, by the mean
probability P_i that the router gave it, which has one: experts that are chosen too often are made less probable.

**Scale.** Both losses enter the objective under its one division rule: each is a sum over the valid tokens of a micro-batch, times its
coefficient, and the step divides it with the loss by the valid tokens of the global batch. f and P are taken over a single row, times
the row's tokens. So the objective is

    mean over all valid tokens of (cross-entropy + sum over layers of (c_balance * balance loss of the token's row + c_z * z-loss))

however the rows are spread over micro-batches and ranks: the gradient is the same to rounding. Statistics of a micro-batch, which
most codes take, change the objective with its size. (OLMo-core calls rows `instance`; DeepSeek-V3, section 2.1.2: sequence-wise.)
Layers are added: averaged before the product, layers with opposite imbalances would cancel.

Left out on purpose: shares over the global batch (Qiu et al. 2025), which need each step's counts before its first backward pass.
"""

import torch
from torch import Tensor

from shared.model.config import ModelConfig
from shared.moe.config import MixtureConfig


def balance_loss(probabilities: Tensor, experts: Tensor, valid: Tensor) -> Tensor:
    """The load-balancing loss of a layer, row by row, each times the row's valid tokens.

        sum over rows r of  n_r * sum over experts i of f_ri * P_ri
        f_ri = choices of expert i by the row's n_r valid tokens / n_r         P_ri = mean over those tokens of probabilities[..., i]

    Args:
        probabilities: [batch, seq, E], each token's adding up to 1. The loss has a gradient to them alone.
        experts: [batch, seq, k] int64, the experts that each token chose.
        valid: [batch, seq] bool, the tokens that count; a row may have none, and adds 0.

    Returns:
        [], in the dtype of `probabilities`. Where all is balanced, k / E for each valid token.

    >>> probabilities, experts = torch.full((1, 2, 4), 0.25), torch.tensor([[[0, 1], [2, 3]]])
    >>> balance_loss(probabilities, experts, torch.ones(1, 2, dtype=torch.bool))               # 2 tokens * 2 / 4
    tensor(1.)
    """
    tokens = valid.sum(dim=1).clamp(min=1)
    mass = torch.where(valid.unsqueeze(-1), probabilities, 0).sum(dim=1)  # [batch, E]
    counts = torch.zeros_like(mass).scatter_add_(1, experts.flatten(1), valid.repeat_interleave(experts.shape[-1], dim=1).to(mass.dtype))
    return ((counts * mass).sum(dim=-1) / tokens).sum()


def z_loss(logits: Tensor, valid: Tensor) -> Tensor:
    """The router z-loss (Zoph et al. 2022, ST-MoE, equation 5): it keeps the logits small, which rounds them less.

        sum over valid tokens of logsumexp(logits) ** 2

    Args:
        logits: [batch, seq, E].
        valid: [batch, seq] bool, the tokens that count.

    Returns:
        [], in the dtype of `logits`.
    """
    return torch.where(valid, logits.logsumexp(dim=-1).square(), 0).sum()


def balance_scale(config: ModelConfig, experts: MixtureConfig) -> float:
    """What multiplies a layer's `balance_loss` by the configured convention; see `MixtureConfig.balance_convention`."""
    layers = config.num_hidden_layers - experts.first_k_dense
    divisors = {"megatron": experts.num_experts_per_tok, "switch": 1, "transformers": layers}
    return experts.num_experts / divisors[experts.balance_convention]
