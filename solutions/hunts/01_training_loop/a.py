"""Gradient accumulation over micro-batches. A step should not depend on how its rows are cut: the columns should be equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

IDS, IGNORED = 12, -100


def loss(scores: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of a table of pairs, and how many targets count. inputs, targets: [rows, columns]."""
    logits = scores[inputs].flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), (targets != IGNORED).sum()


def step(scores: Tensor, inputs: Tensor, targets: Tensor, size: int, rate: float) -> float:
    """One step of gradient descent in micro-batches of `size` rows. Returns the loss."""
    scores.grad = None
    total, count = 0.0, (targets != IGNORED).sum()
    for some, wanted in zip(inputs.split(size), targets.split(size)):
        own, number = loss(scores, some, wanted)
        part = own / count
        part.backward()
        total += part.item()
    with torch.no_grad():
        scores -= rate * scores.grad
    return total


def train(inputs: Tensor, targets: Tensor, scores: Tensor, size: int, steps: int, rate: float) -> tuple[list[float], Tensor]:
    """The losses of several steps on the same rows, and the scores after them."""
    trained = scores.clone().requires_grad_()
    losses = [step(trained, inputs, targets, size, rate) for _ in range(steps)]
    return losses, trained.detach()


def example(seed: int, lengths: list[int], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ids of which the first `lengths` targets count, as in a batch that is padded, and scores to begin with."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randint(IDS, (len(lengths), columns), generator=random)
    targets = (inputs * 5 + 1) % IDS
    for row, length in enumerate(lengths):
        targets[row, :length] = torch.randint(IDS, (length,), generator=random) if length > 6 else targets[row, :length]
        targets[row, length:] = IGNORED
    return inputs, targets, torch.randn(IDS, IDS, generator=random, dtype=torch.float64)


def main() -> None:
    inputs, targets, scores = example(0, [16, 1, 16, 2, 15, 1, 3, 16], 16)
    sizes = (8, 4, 2, 1)
    print("rows in a micro-batch ", *(f"{size:>8}" for size in sizes))
    runs = [train(inputs, targets, scores, size, 20, 2.0) for size in sizes]
    for number in (0, 4, 9, 19):
        print(f"loss of step {number + 1:>2}       ", *(f"{losses[number]:8.4f}" for losses, _ in runs))
    judged = [loss(trained, inputs, targets) for _, trained in runs]
    print("all targets, at the end", *(f"{(own / number).item():7.4f} " for own, number in judged))


if __name__ == "__main__":
    main()
