"""Oracles of 12.grpo_policy_loss in which every answer is enumerated: a policy over 3 tokens, a table of logits for each token before."""

import itertools

import torch

from .common import randn

EXPECTED = "the gradient of minus the expected advantage, over all answers of the policy"
SAMPLED = "importance sampling: the mean of ratio * A under the old policy is the mean of A under the new one"


def enumerated(function, table, length, level):
    """Each answer of the policy, weighted by its probability, all in one row; one advantage for all of an answer's tokens."""
    leaf = table.clone().requires_grad_()
    answers = torch.tensor(list(itertools.product(range(3), repeat=length)))
    before = torch.cat([torch.full((len(answers), 1), 3), answers[:, :-1]], dim=1)
    logs = leaf.log_softmax(-1)[before, answers]
    weights = logs.detach().sum(1).exp()
    advantages = randn(len(answers), 1, seed=4).expand_as(logs)
    numbers = torch.arange(len(answers)).unsqueeze(1).expand_as(answers)
    row = [tensor.reshape(1, -1) for tensor in (logs, logs.detach(), advantages, numbers)]
    losses = function(*row, 0.2, 0.28, level).view(logs.shape)
    [gradient] = torch.autograd.grad((losses.sum(1) * weights).sum(), [leaf])
    return {"gradient of the policy's logits": gradient}


def expected_advantage(table, length, level):
    leaf = table.clone().requires_grad_()
    p, advantages = leaf.softmax(-1), randn(3**length, seed=4).view(3, 3, 3)
    [gradient] = torch.autograd.grad(-torch.einsum("a,ab,bc,abc->", p[3], p[:3], p[:3], advantages), [leaf])
    return {"gradient of the policy's logits": gradient}


def far_away(function, now, old, level):
    """Without an edge, answers of one token: weighted as the old policy draws, the loss is minus the new one's expected advantage."""
    row = now.log_softmax(0)[None], old.log_softmax(0)[None], randn(1, len(now), seed=4), torch.arange(len(now))[None]
    return {"the expected loss": (old.softmax(0) * function(*row, 1e9, 1e9, level)).sum()}


def new_advantage(now, old, level):
    return {"the expected loss": -torch.dot(now.softmax(0), randn(1, len(now), seed=4)[0])}
