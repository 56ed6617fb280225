"""GRPO with a KL penalty. The policy should come to like answers with large rewards, and stay near its reference."""

import torch
from torch import Tensor

WORDS, TIME, GROUP = 6, 3, 8  # a word follows another one: the policy is a table of logits


def log_probs(answers: Tensor, logits: Tensor) -> Tensor:
    """Of each word after the one before it, word 0 in front: [answers, time]."""
    before = torch.cat([torch.zeros_like(answers[:, :1]), answers[:, :-1]], dim=1)
    return logits[before].log_softmax(dim=-1).gather(-1, answers[..., None]).squeeze(-1)


def draw(logits: Tensor, count: int, random: torch.Generator) -> Tensor:
    words = [torch.zeros(count, dtype=torch.int64)]
    for _ in range(TIME):
        words.append(torch.multinomial(logits[words[-1]].softmax(dim=-1), 1, generator=random).squeeze(1))
    return torch.stack(words[1:], dim=1)


def loss_of(answers: Tensor, advantages: Tensor, logits: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The policy loss and the KL penalty, both as means over words."""
    now = log_probs(answers, logits)
    ratio = (now - now.detach()).exp()
    policy = -(ratio * advantages[:, None]).mean()
    gap = log_probs(answers, reference) - now
    return policy, beta * (gap.exp() - 1 - gap).mean()


def train(reference: Tensor, rewards: Tensor, steps: int, beta: float, rate: float, seed: int) -> tuple[list[list[float]], Tensor]:
    """Steps of GRPO from a policy that has moved away from its reference. rewards: [WORDS] of each word; an answer's is their sum.

    Returns:
        For each step the policy loss and the KL penalty before it; and the policy's logits afterwards.
    """
    random = torch.Generator().manual_seed(seed)
    logits = reference + torch.randn(reference.shape, generator=random, dtype=torch.float64)
    seen = []
    for _ in range(steps):
        logits.requires_grad_()
        answers = draw(logits.detach(), 4 * GROUP, random)
        groups = rewards[answers].sum(dim=1).view(-1, GROUP)
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
        parts = loss_of(answers, advantages, logits, reference, beta)
        (gradient,) = torch.autograd.grad(sum(parts), logits)
        seen.append([part.item() for part in parts])
        logits = (logits - rate * gradient).detach()
    return seen, logits


def example(seed: int) -> tuple[Tensor, Tensor]:
    """The reference's logits [WORDS, WORDS], and the reward of each word."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, WORDS, generator=random, dtype=torch.float64), torch.arange(WORDS).double()


def main() -> None:
    reference, rewards = example(0)
    print("steps   policy loss   KL penalty   mean reward of 2,000 answers")
    for steps in (1, 20, 80, 320):
        seen, logits = train(reference, rewards, steps, 0.5, 0.5, 1)
        drawn = rewards[draw(logits, 2000, torch.Generator().manual_seed(2))].sum(dim=1).mean()
        policy, penalty = seen[-1]
        print(f"{steps:>5}   {round(abs(policy), 6):>11.4f}   {penalty:>10.4f}   {drawn:>28.2f}")


if __name__ == "__main__":
    main()
