"""A policy gradient on answers that were drawn and rewarded before, with whitened advantages, in micro-batches. How many answers stand in a
micro-batch is a question of memory, and should not change what is learned."""

import torch
from torch import Tensor

ANSWERS = 7  # an answer is one token here


def whitened(numbers: Tensor) -> Tensor:
    """[n] with mean 0 and standard deviation 1."""
    return (numbers - numbers.mean()) / (numbers.std(correction=0) + 1e-8)


def policy_loss(answers: Tensor, advantages: Tensor, old_log_probs: Tensor, logits: Tensor) -> Tensor:
    """PPO's clipped loss of each answer: [n]."""
    ratio = (logits.log_softmax(dim=-1)[answers] - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def train(answers: Tensor, rewards: Tensor, logits: Tensor, size: int, updates: int, rate: float) -> tuple[list[float], Tensor]:
    """Updates of the logits [ANSWERS] on answers [n] that were drawn with them, in micro-batches of `size`. Returns the losses, and the
    logits after it."""
    old = logits.log_softmax(dim=-1)[answers]
    held = logits.clone().requires_grad_()
    losses = []
    for _ in range(updates):
        held.grad, total = None, 0.0
        advantages = whitened(rewards)
        for some in torch.arange(len(answers)).split(size):
            loss = policy_loss(answers[some], advantages[some], old[some], held).sum() / len(answers)
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            held -= rate * held.grad
        losses.append(total)
    return losses, held.detach()


def example(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Answers, rewards, and the logits that the answers were drawn from. Answers with a larger number are better."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(ANSWERS, generator=random, dtype=torch.float64) / 2
    answers = torch.multinomial(logits.softmax(dim=-1), count, replacement=True, generator=random)
    return answers, answers.double() + torch.randn(count, generator=random, dtype=torch.float64) / 4, logits


def main() -> None:
    answers, rewards, logits = example(0, 48)
    print(f"answers in a micro-batch   how far the logits moved in four updates   expected reward (before: {expected(logits):.3f})")
    for size in (48, 12, 3, 1):
        _, trained = train(answers, rewards, logits, size, 4, 0.5)
        print(f"{size:>24}   {(trained - logits).norm().item():>40.4f}   {expected(trained):>15.3f}")


def expected(logits: Tensor) -> float:
    return (logits.softmax(dim=-1) * torch.arange(ANSWERS)).sum().item()


if __name__ == "__main__":
    main()
