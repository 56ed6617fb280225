"""A learning rate that warms up and falls to 0, in a run whose batches are cut into micro-batches. How many micro-batches a batch has is a
question of memory, and should not change what is learned. The warm-up has four steps here, and the peak is 0.2: the first step's rate
should be 0.05."""

import torch
from torch import Tensor


class Schedule:
    """The learning rate of the next step: up to `peak` in `warm_up` steps, then down to 0 at the end of `steps`."""

    def __init__(self, peak: float, warm_up: int, steps: int):
        self.peak, self.warm_up, self.steps, self.done = peak, warm_up, steps, 0

    @property
    def rate(self) -> float:
        up, down = (self.done + 1) / self.warm_up, (self.steps - self.done) / (self.steps - self.warm_up)
        return self.peak * max(0.0, min(1.0, up, down))

    def advance(self) -> None:
        self.done += 1


def loss_of(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of squared errors over the examples."""
    return (inputs @ weights - targets).square().sum()


def train(weights: Tensor, inputs: Tensor, targets: Tensor, size: int, steps: int, peak: float) -> tuple[list[float], Tensor]:
    """Steps over all examples, in micro-batches of `size`. Returns the learning rate of each step, and the weights."""
    held, schedule, rates = weights.clone().requires_grad_(), Schedule(peak, 4, steps), []
    for _ in range(steps):
        held.grad = None
        for some in torch.arange(len(inputs)).split(size):
            (loss_of(held, inputs[some], targets[some]) / len(inputs)).backward()
        rates.append(schedule.rate)
        with torch.no_grad():
            held -= schedule.rate * held.grad
        schedule.advance()
    return rates, held.detach()


def example(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and inputs with targets that a straight line would give but for some noise."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    inputs, right = draw(count, 6), draw(6)
    return draw(6), inputs, inputs @ right + draw(count) / 10


def main() -> None:
    weights, inputs, targets = example(0, 24)
    print("micro-batches   learning rate of steps 1, 2, 4, 8, 16              loss before   after 16 steps")
    before = loss_of(weights, inputs, targets).item() / len(inputs)
    for count in (1, 2, 4):
        rates, trained = train(weights, inputs, targets, len(inputs) // count, 16, 0.2)
        shown = "  ".join(f"{rates[step - 1]:.4f}" for step in (1, 2, 4, 8, 16))
        print(f"{count:>13}   {shown:<48} {before:>13.4f}   {loss_of(trained, inputs, targets).item() / len(inputs):>14.4f}")


if __name__ == "__main__":
    main()
