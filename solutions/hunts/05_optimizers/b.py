"""AdamW with groups. How parameters are shared out over groups of equal settings is a question of order in the program, and should not
change what is learned."""

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


class AdamW:
    """groups: lists of tensors, each with its own decay."""

    def __init__(self, groups: list[tuple[list[Tensor], float]], rate: float):
        self.groups, self.rate, self.steps = groups, rate, 0
        self.means = {id(weight): (torch.zeros_like(weight), torch.zeros_like(weight)) for weights, _ in groups for weight in weights}

    def step(self, gradients: dict[int, Tensor]) -> None:
        """gradients: by the tensor's id."""
        self.steps += 1
        for weights, decay in self.groups:
            self.move(weights, decay, gradients)

    def move(self, weights: list[Tensor], decay: float, gradients: dict[int, Tensor]) -> None:
        mean_part, square_part = (1 - beta**self.steps for beta in BETAS)
        for weight in weights:
            mean, squares = self.means[id(weight)]
            gradient = gradients[id(weight)]
            mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            squares.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            weight.mul_(1 - self.rate * decay)
            weight.sub_(self.rate * (mean / mean_part) / ((squares / square_part).sqrt() + EPS))


def train(weights: list[Tensor], gradients: list[list[Tensor]], sizes: list[int], rate: float, decay: float) -> list[Tensor]:
    """Steps on copies of the weights, shared out over groups of these sizes. Returns the new weights."""
    held = [weight.clone() for weight in weights]
    groups, first = [], 0
    for size in sizes:
        groups.append((held[first : first + size], decay))
        first += size
    optimizer = AdamW(groups, rate)
    for own in gradients:
        optimizer.step({id(weight): gradient for weight, gradient in zip(held, own, strict=True)})
    return held


def example(seed: int, count: int, steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights, and the gradients of each step."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: [torch.randn(3, generator=random, dtype=torch.float64) for _ in range(count)]  # noqa: E731
    return draw(), [draw() for _ in range(steps)]


def main() -> None:
    weights, gradients = example(0, 4, 3)
    print("groups of      how far each of the four tensors has moved after one step, after three")
    for sizes in ([4], [2, 2], [1, 1, 1, 1]):
        far = []
        for steps in (1, 3):
            trained = train(weights, gradients[:steps], sizes, 0.1, 0.0)
            far.append("  ".join(f"{(new - old).norm():.3f}" for new, old in zip(trained, weights)))
        print(f"{', '.join(map(str, sizes)):<13}  {far[0]}   |   {far[1]}")


if __name__ == "__main__":
    main()
