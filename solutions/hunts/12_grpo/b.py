"""A policy on two ranks, each of which learns from answers of its own. After each step all ranks should hold the same weights."""

import torch
from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

WORDS, RANKS = 5, 2


class Replicated(nn.Module):
    """Wraps a module: after a forward pass through the wrapper, the next backward pass averages gradients over the ranks."""

    def __init__(self, module: nn.Module, world: Communicator):
        super().__init__()
        self.module, self.world, self.is_armed = module, world, False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def forward(self, words: Tensor) -> Tensor:
        self.is_armed = torch.is_grad_enabled()
        return self.module(words)

    def average(self, parameter: nn.Parameter) -> None:
        if self.is_armed:
            self.world.all_reduce(parameter.grad)
            parameter.grad /= self.world.size


def policy_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(WORDS, 7), nn.Tanh(), nn.Linear(7, WORDS)).double()


def draw(policy: Replicated, prompts: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A word for each prompt, and its log-probability: [answers] each."""
    with torch.no_grad():
        log_probs = policy(prompts).log_softmax(dim=-1)
    words = torch.multinomial(log_probs.exp(), 1, generator=random)
    return words.squeeze(1), log_probs.gather(1, words).squeeze(1)


def step(policy: Replicated, prompts: Tensor, words: Tensor, old: Tensor, advantages: Tensor, rate: float) -> float:
    """An update on this rank's answers. Returns their loss."""
    log_probs = policy(prompts).log_softmax(dim=-1).gather(1, words[:, None]).squeeze(1)
    loss = -((log_probs - old).exp() * advantages).mean()
    policy.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= rate * parameter.grad
    return loss.item()


def train(steps: int, answers: int, rate: float, seed: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of each rank after some steps. A word's reward is its number; a rank's advantages are over its own answers."""

    def work(world: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        policy, losses = Replicated(models[world.rank], world), []
        random = torch.Generator().manual_seed(1000 * seed + world.rank)
        for _ in range(steps):
            prompts = torch.randint(WORDS, (answers,), generator=random)
            words, old = draw(policy, prompts, random)
            rewards = words.double()
            losses.append(step(policy, prompts, words, old, rewards - rewards.mean(), rate))
        return losses, {name: part.detach() for name, part in policy.module.state_dict().items()}

    models = [policy_of(seed) for _ in range(RANKS)]
    return run_threads(work, RANKS)


def main() -> None:
    print("steps   largest difference between the ranks' weights   mean probability of the best word, by rank")
    for steps in (1, 10, 50):
        (_, first), (_, second) = train(steps, 16, 0.2, 3)
        apart = max((first[name] - second[name]).abs().max().item() for name in first)
        best = []
        for weights in (first, second):
            policy = policy_of(0)
            policy.load_state_dict(weights)
            best.append(policy(torch.arange(WORDS)).softmax(dim=-1)[:, -1].mean().item())
        print(f"{steps:>5}   {apart:>44.4f}   {best[0]:>30.3f} and {best[1]:.3f}")


if __name__ == "__main__":
    main()
