"""Trains a policy with GRPO for short answers: the fewer words before the end, the larger the reward."""

import torch
from torch import Tensor

WORDS, END, LONGEST, GROUP = 5, 4, 12, 8  # word 4 ends an answer


def log_probs(answers: Tensor, logits: Tensor) -> Tensor:
    """Of each word after the one before it, word 0 in front: [answers, time]."""
    before = torch.cat([torch.zeros_like(answers[:, :1]), answers[:, :-1]], dim=1)
    return logits[before].log_softmax(dim=-1).gather(-1, answers[..., None]).squeeze(-1)


def draw(logits: Tensor, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers [count, LONGEST], filled up with END behind their end, and how many words each wrote, its end included: [count]."""
    words = [torch.zeros(count, dtype=torch.int64)]
    lengths, is_open = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool)
    for _ in range(LONGEST):
        word = torch.multinomial(logits[words[-1]].softmax(dim=-1), 1, generator=random).squeeze(1)
        words.append(word.where(is_open, END))
        lengths += is_open
        is_open = is_open & (word != END)
    return torch.stack(words[1:], dim=1), lengths


def reward_of(answers: Tensor, lengths: Tensor) -> Tensor:
    """1 less a twelfth for each word before the end, and 0 for an answer that never ended: [answers]."""
    before_the_end = (answers != END).sum(dim=1)
    return (1 - before_the_end / LONGEST).where(before_the_end < LONGEST, 0).double()


def loss_of(answers: Tensor, lengths: Tensor, advantages: Tensor, logits: Tensor, old: Tensor) -> Tensor:
    """The mean over all words that were written."""
    written = torch.arange(answers.shape[1]) < lengths[:, None]
    ratio = (log_probs(answers, logits) - old).exp()
    return -(ratio * advantages[:, None])[written].mean()


def train(logits: Tensor, steps: int, rate: float, seed: int) -> tuple[list[float], Tensor]:
    """Returns the mean length of each step's answers, and the logits afterwards."""
    random, seen = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        answers, lengths = draw(logits, 4 * GROUP, random)
        groups = reward_of(answers, lengths).view(-1, GROUP)
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
        moving = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(answers, lengths, advantages, moving, log_probs(answers, logits)), moving)
        logits = (logits - rate * gradient).detach()
        seen.append(lengths.double().mean().item())
    return seen, logits


def example(seed: int) -> Tensor:
    """A policy's logits [WORDS, WORDS], which seldom ends."""
    logits = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
    logits[:, END] -= 1
    return logits


def main() -> None:
    print("steps   words in an answer, its end included   probability of ending after each word")
    for steps in (1, 20, 80, 320):
        seen, logits = train(example(0), steps, 1.0, 1)
        ending = logits.softmax(dim=-1)[:END, END]
        print(f"{steps:>5}   {seen[-1]:>36.2f}   {'  '.join(f'{each:.3f}' for each in ending.tolist())}")


if __name__ == "__main__":
    main()
