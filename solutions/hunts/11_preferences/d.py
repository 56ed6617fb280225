"""PPO with several updates for each set of answers. The clip should hold the policy near the one that drew the answers."""

import torch
from torch import Tensor

PROMPTS, ANSWERS = 4, 6  # an answer is one token here


def log_probs(prompts: Tensor, answers: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Of each answer after its prompt: [n]."""
    logits = torch.tanh(weights["in"][prompts]) @ weights["out"]
    return logits.log_softmax(dim=-1).gather(-1, answers[:, None]).squeeze(1)


def clipped(ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The loss of each answer, and whether the clip took its gradient away: [n] each."""
    free, held = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return -torch.minimum(free, held), held < free


def learn(
    prompts: Tensor, answers: Tensor, advantages: Tensor, weights: dict[str, Tensor], updates: int, clip: float, rate: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Updates on one set of answers [n], which `weights` drew. Returns losses, shares of answers that are clipped, and the weights."""
    policy = {name: part.clone().requires_grad_() for name, part in weights.items()}
    with torch.no_grad():
        old = log_probs(prompts, answers, policy)
    losses, shares = [], []
    for _ in range(updates):
        ratio = (log_probs(prompts, answers, policy) - old).exp()
        by_answer, is_clipped = clipped(ratio, advantages, clip)
        loss = by_answer.mean()
        gradients = torch.autograd.grad(loss, list(policy.values()))
        with torch.no_grad():
            for part, gradient in zip(policy.values(), gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
        shares.append(is_clipped.double().mean().item())
    return losses, shares, {name: part.detach() for name, part in policy.items()}


def example(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Prompts, answers, advantages, and the weights that drew the answers. A prompt has an answer of its own that is the best."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"in": (PROMPTS, 8), "out": (8, ANSWERS)}
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    prompts = torch.randint(PROMPTS, (count,), generator=random)
    probabilities = (torch.tanh(weights["in"][prompts]) @ weights["out"]).softmax(dim=-1)
    answers = torch.multinomial(probabilities, 1, generator=random).squeeze(1)
    rewards = -(answers - prompts).abs().double()
    return prompts, answers, rewards - rewards.mean(), weights


def main() -> None:
    prompts, answers, advantages, weights = example(0, 64)
    print("update   loss      clipped   smallest and largest ratio to the policy that drew, after it")
    for updates in (1, 4, 16, 64):
        losses, shares, trained = learn(prompts, answers, advantages, weights, updates, 0.2, 0.5)
        ratio = (log_probs(prompts, answers, trained) - log_probs(prompts, answers, weights)).exp()
        print(f"{updates:>6}   {losses[-1]:>7.4f}   {shares[-1]:>6.0%}   {ratio.min().item():>25.3f}   {ratio.max().item():.3f}")


if __name__ == "__main__":
    main()
