"""A mixture of experts by brute force: every expert computes every token, and the gates say what counts. Nothing is sorted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.moe.config import MixtureModelConfig
from shared.moe.layer import MixtureLayer


def dense_gates(layer: MixtureLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits, scores and gates, each [batch, seq, E]; the gate of an expert that was not chosen is 0. A loop over tokens and choices."""
    config = layer.config
    logits = x @ layer.router.weight.T
    scores = logits.exp() / logits.exp().sum(dim=-1, keepdim=True) if config.scoring == "softmax" else 1 / (1 + (-logits).exp())
    gates = torch.zeros_like(scores)
    size = config.num_experts // config.n_group
    for row in range(x.shape[0]):
        for place in range(x.shape[1]):
            biased = scores[row, place].tolist()
            if layer.router.bias is not None:
                biased = [score + bias for score, bias in zip(biased, layer.router.bias.tolist(), strict=True)]
            groups = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(config.n_group)]
            best = sorted(range(config.n_group), key=lambda g: -groups[g])[: config.topk_group]
            allowed = [e for e in range(config.num_experts) if e // size in best]
            chosen = sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_tok]
            total = sum(scores[row, place, e] for e in chosen) if config.norm_topk_prob else 1
            for e in chosen:
                gates[row, place, e] = scores[row, place, e] / total * config.routed_scaling_factor
    return logits, scores, gates


def drop(gates: Tensor, weights_order: Tensor, capacity: int) -> Tensor:
    """The gates with what comes after `capacity` choices of an expert in its row set to 0, token by token."""
    kept = gates.clone()
    for row in range(gates.shape[0]):
        taken = [0] * gates.shape[-1]
        for place in range(gates.shape[1]):
            for expert in weights_order[row, place].tolist():
                taken[expert] += 1
                if taken[expert] > capacity:
                    kept[row, place, expert] = 0
    return kept


def mix(layer: MixtureLayer, x: Tensor, gates: Tensor) -> Tensor:
    """Every expert on every token, weighted by the gate."""
    out = torch.zeros_like(x)
    for expert in range(layer.config.num_experts):
        up, down = layer.experts.up_proj.weight[expert], layer.experts.down_proj.weight[expert]
        inner = x @ up.T
        if layer.experts.gate_proj is None:
            inner = F.gelu(inner)
        else:
            gate = x @ layer.experts.gate_proj.weight[expert].T
            inner = gate * torch.sigmoid(gate) * inner
        out = out + gates[..., expert, None] * (inner @ down.T)
    return out if layer.shared_experts is None else out + layer.shared_experts(x)


def losses(layer: MixtureLayer, logits: Tensor, scores: Tensor, gates: Tensor, valid: Tensor) -> Tensor:
    """Both losses of one layer as it adds them to the objective, row by row: [], megatron's convention."""
    config, total = layer.config, 0.0
    for row in range(len(logits)):
        tokens = valid[row].nonzero().flatten().tolist()
        if not tokens:
            continue
        share = torch.stack([(gates[row, place] != 0).to(scores.dtype) for place in tokens]).mean(dim=0)
        mean = torch.stack([scores[row, place] / scores[row, place].sum() for place in tokens]).mean(dim=0)
        balance = config.num_experts / config.num_experts_per_tok * (share.detach() * mean).sum()
        z = torch.stack([logits[row, place].exp().sum().log() ** 2 for place in tokens]).sum()
        total = total + config.balance_coefficient * len(tokens) * balance + config.z_coefficient * z
    return total


CONFIG = MixtureModelConfig(
    vocab_size=31, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, max_position_embeddings=32
)
