"""DPO on pairs, with a reference: a copy of the policy as it was at first. The loss should begin at log 2 and fall, less and less."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PROMPTS, ANSWERS = 6, 5  # an answer is one token here
Pairs = tuple[Tensor, Tensor, Tensor]  # prompts, chosen and rejected answers: [pairs] each


def log_probs(prompts: Tensor, answers: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Of each answer after its prompt: [pairs]."""
    logits = torch.tanh(weights["in"][prompts]) @ weights["out"]
    return logits.log_softmax(dim=-1).gather(-1, answers[:, None]).squeeze(1)


def dpo_loss(pairs: Pairs, policy: dict[str, Tensor], reference: dict[str, Tensor], beta: float) -> Tensor:
    """The loss of each pair: [pairs]."""
    prompts, chosen, rejected = pairs
    with torch.no_grad():
        expected = log_probs(prompts, chosen, reference) - log_probs(prompts, rejected, reference)
    found = log_probs(prompts, chosen, policy) - log_probs(prompts, rejected, policy)
    return -F.logsigmoid(beta * (found - expected))


def train(
    pairs: Pairs, weights: dict[str, Tensor], beta: float, steps: int, rate: float, size: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Gradient descent on the mean loss, in micro-batches of `size` pairs. Returns losses, lengths of the gradients, and the weights."""
    policy = {name: part.clone().requires_grad_() for name, part in weights.items()}
    reference = {name: part.detach().clone() for name, part in policy.items()}
    losses, lengths = [], []
    for _ in range(steps):
        total = 0.0
        for part in policy.values():
            part.grad = None
        for first in range(0, len(pairs[0]), size):
            some = tuple(each[first : first + size] for each in pairs)
            loss = dpo_loss(some, policy, reference, beta).sum() / len(pairs[0])
            loss.backward()
            total += loss.item()
        lengths.append(math.sqrt(sum(part.grad.square().sum().item() for part in policy.values())))
        with torch.no_grad():
            for part in policy.values():
                part -= rate * part.grad
        losses.append(total)
    return losses, lengths, {name: part.detach() for name, part in policy.items()}


def example(seed: int, pairs: int) -> tuple[Pairs, dict[str, Tensor]]:
    """Pairs in which the answer with the smaller number is the better one, and first weights."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(PROMPTS, (pairs,), generator=random)
    chosen = torch.randint(ANSWERS - 1, (pairs,), generator=random)
    rejected = chosen + 1 + (torch.rand(pairs, generator=random) * (ANSWERS - 1 - chosen)).long()
    shapes = {"in": (PROMPTS, 8), "out": (8, ANSWERS)}
    return (prompts, chosen, rejected), {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def main() -> None:
    pairs, weights = example(0, 16)
    print("step   loss    length of the gradient   pairs with the chosen answer likelier   largest weight")
    for steps in (1, 5, 25, 125):
        losses, lengths, trained = train(pairs, weights, 0.5, steps, 1.0, 4)
        with torch.no_grad():
            right = log_probs(pairs[0], pairs[1], trained) > log_probs(pairs[0], pairs[2], trained)
        largest = max(part.abs().max().item() for part in trained.values())
        print(f"{steps:>4}   {losses[-1]:.4f}  {lengths[-1]:>22.4f}   {int(right.sum()):>31} of {len(right)}   {largest:>14.2f}")


if __name__ == "__main__":
    main()
