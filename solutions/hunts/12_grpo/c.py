"""Draws answers at a temperature, and updates the policy from them twice. The first update should see the policy that drew them."""

import torch
from torch import Tensor

PROMPTS, WORDS = 4, 7  # an answer is one word here


def draw(logits: Tensor, prompts: Tensor, temperature: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A word for each prompt, and the log-probability that it was drawn with: [answers] each."""
    probabilities = (logits[prompts] / temperature).softmax(dim=-1)
    words = torch.multinomial(probabilities, 1, generator=random)
    return words.squeeze(1), probabilities.gather(1, words).squeeze(1).log()


def log_probs(logits: Tensor, prompts: Tensor, words: Tensor, temperature: float) -> Tensor:
    """Of words as the policy draws them now: [answers]."""
    return (logits[prompts] / temperature).log_softmax(dim=-1).gather(1, words[:, None]).squeeze(1)


def update(
    logits: Tensor, prompts: Tensor, words: Tensor, old: Tensor, advantages: Tensor, temperature: float, clip: float, rate: float
) -> tuple[Tensor, Tensor]:
    """A step of the clipped loss. Returns the ratios before it [answers], and the logits after it."""
    logits = logits.detach().requires_grad_()
    ratio = (log_probs(logits, prompts, words, temperature) - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    return ratio.detach(), (logits - rate * gradient).detach()


def learn(logits: Tensor, rollouts: int, count: int, temperature: float, rate: float, seed: int) -> tuple[list[float], list[float], Tensor]:
    """Rollouts of `count` answers with two updates each. The reward of a word is 1 where it is the prompt's own number, else 0.

    Returns:
        For each rollout the mean ratio and the share of clipped answers in its first update; and the logits.
    """
    random, means, shares = torch.Generator().manual_seed(seed), [], []
    for _ in range(rollouts):
        prompts = torch.randint(PROMPTS, (count,), generator=random)
        words, old = draw(logits, prompts, temperature, random)
        rewards = (words == prompts).double()
        advantages = rewards - rewards.mean()
        ratio, logits = update(logits, prompts, words, old, advantages, temperature, 0.2, rate)
        means.append(ratio.mean().item())
        shares.append(((ratio - 1).abs() > 0.2).double().mean().item())
        _, logits = update(logits, prompts, words, old, advantages, temperature, 0.2, rate)
    return means, shares, logits


def example(seed: int) -> Tensor:
    """A policy's logits: [PROMPTS, WORDS]."""
    return torch.randn(PROMPTS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def main() -> None:
    print("temperature   mean ratio in a first update   clipped there   probability of the right word before and after")
    right = torch.arange(PROMPTS)
    for temperature in (0.5, 1.0, 2.0):
        means, shares, logits = learn(example(0), 60, 64, temperature, 2.0, 1)
        before, after = ((each / temperature).softmax(dim=-1)[right, right].mean().item() for each in (example(0), logits))
        print(f"{temperature:>11}   {means[0]:>28.3f}   {sum(shares) / len(shares):>13.0%}   {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
