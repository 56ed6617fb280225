"""A model with dropout that is judged now and then while it is trained. How often it is judged should not change what it learns."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDS = 8


class Model(nn.Module):
    """A hidden layer over the last two ids, with dropout of its own stream, and a count of the calls in which it was on."""

    def __init__(self, seed: int, rate: float):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(2 * IDS, 24, generator=random, dtype=torch.float64) / 2)
        self.second = nn.Parameter(torch.randn(24, IDS, generator=random, dtype=torch.float64) / 2)
        self.rate, self.random, self.dropped = rate, random, 0

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs: [examples, 2] -> logits [examples, IDS]"""
        hidden = torch.tanh(F.one_hot(pairs, IDS).to(self.first).flatten(1) @ self.first)
        if self.training:
            self.dropped += 1
            kept = torch.rand(hidden.shape, generator=self.random, dtype=torch.float64) >= self.rate
            hidden = hidden * kept / (1 - self.rate)
        return hidden @ self.second


def judge(model: Model, pairs: Tensor, targets: Tensor) -> float:
    """The mean loss, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = F.cross_entropy(model(pairs), targets).item()
    model.train(was_training)
    return found


def train(
    data: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], seed: int, steps: int, judge_every: int, rate: float
) -> tuple[list[float], list[float], int, dict[str, Tensor]]:
    """Returns the losses of the steps, those on held-out pairs, the steps with dropout, and the weights."""
    model, losses, judged = Model(seed, rate), [], []
    model.train()
    for number in range(1, steps + 1):
        model.zero_grad()
        loss = F.cross_entropy(model(data[0]), data[1])
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.5 * weight.grad
        losses.append(loss.item())
        if number % judge_every == 0:
            judged.append(judge(model, *held_out))
    return losses, judged, model.dropped, {name: weight.detach().clone() for name, weight in model.named_parameters()}


def example(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Pairs of ids, and the id after each of them: a rule, but for one in four."""
    random = torch.Generator().manual_seed(seed)
    pairs = torch.randint(IDS, (count, 2), generator=random)
    targets = (pairs[:, 0] + 3 * pairs[:, 1]) % IDS
    odd = torch.rand(count, generator=random) < 0.25
    return pairs, torch.where(odd, torch.randint(IDS, (count,), generator=random), targets)


def main() -> None:
    data, held_out = example(0, 60), example(1, 200)
    print("judged every   steps with dropout   training loss, last of 400 steps   held-out loss at the end")
    for judge_every in (400, 100, 10, 1):
        losses, judged, dropped, _ = train(data, held_out, 2, 400, judge_every, 0.5)
        print(f"{judge_every:>12}   {dropped:>18}   {losses[-1]:>32.3f}   {judged[-1]:>24.3f}")


if __name__ == "__main__":
    main()
