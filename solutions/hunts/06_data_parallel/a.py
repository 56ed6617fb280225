"""Data parallelism with gradient accumulation: each rank has several micro-batches in a step, and the ranks add up their gradients once.
Loss and weight should not depend on how a batch is cut into micro-batches, nor on the ranks."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def gradient_of(weight: Tensor, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Of the sum of squared errors over these rows, halved."""
    return inputs.T @ (inputs @ weight - wanted)


def step_gradient(world: Communicator, weight: Tensor, microbatches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of the mean over all rows of all ranks."""
    total, rows = torch.zeros_like(weight), torch.zeros((), dtype=weight.dtype)
    for inputs, wanted in microbatches:
        gradient = gradient_of(weight, inputs, wanted)
        total += gradient
        rows += len(inputs)
    world.all_reduce(total)
    world.all_reduce(rows)
    return total / rows


def train(world: Communicator, inputs: Tensor, wanted: Tensor, microbatches: int, steps: int, rate: float) -> Tensor:
    """Gradient descent on a linear model. Each rank gets its share of the rows, in micro-batches."""
    weight = torch.zeros(inputs.shape[1], dtype=inputs.dtype)
    mine = [rows.tensor_split(world.size)[world.rank].tensor_split(microbatches) for rows in (inputs, wanted)]
    for _ in range(steps):
        weight -= rate * step_gradient(world, weight, list(zip(*mine, strict=True)))
    return weight


def example(seed: int, rows: int = 48, features: int = 5) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=random, dtype=torch.float64)
    return inputs, inputs @ torch.arange(1.0, features + 1, dtype=torch.float64) + torch.randn(rows, generator=random, dtype=torch.float64)


def main() -> None:
    one = [(torch.ones(1, 1, dtype=torch.float64), -torch.tensor([10.0**place], dtype=torch.float64)) for place in range(6)]
    gradients = run_threads(lambda world: 6 * step_gradient(world, torch.zeros(1).double(), one[2 * world.rank :][:2]), 3)
    print("micro-batch m of rank r brings 10 to the power 2 r + m; the sums of ranks 0 to 2:")
    print("   ", "  ".join(f"{round(gradient.item()):06}" for gradient in gradients))
    print("ranks   micro-batches   first weight of rank 0 and of the last rank, after 40 steps")
    for ranks, microbatches in ((1, 1), (2, 1), (2, 2), (2, 4), (4, 3)):
        weights = run_threads(train, ranks, *example(1), microbatches, 40, 0.1)
        print(f"{ranks:>5}   {microbatches:>13}   {weights[0][0]:.4f}   {weights[-1][0]:.4f}")


if __name__ == "__main__":
    main()
