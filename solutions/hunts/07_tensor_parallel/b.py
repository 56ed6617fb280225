"""A layer with biases, trained over ranks. The losses and the weights at the end should not depend on the ranks."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks. Backward: the gradient as it is, which all ranks have."""

    @staticmethod
    def forward(ctx, x: Tensor, world: Communicator) -> Tensor:
        total = x.clone()
        world.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def cut(weights: dict[str, Tensor], world: Communicator) -> dict[str, Tensor]:
    """This rank's part of up [F, D] and its bias [F], down [D, F] and its bias [D]."""
    mine = torch.arange(len(weights["up"])).chunk(world.size)[world.rank]
    parts = {"up": weights["up"][mine], "up_bias": weights["up_bias"][mine], "down": weights["down"][:, mine]}
    return {name: part.clone().requires_grad_() for name, part in (parts | {"down_bias": weights["down_bias"]}).items()}


def forward(x: Tensor, parts: dict[str, Tensor], world: Communicator) -> Tensor:
    hidden = torch.relu(x @ parts["up"].T + parts["up_bias"])
    return SumOverRanks.apply(hidden @ parts["down"].T, world) + parts["down_bias"]


def train(world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor, steps: int, rate: float) -> tuple[list, dict]:
    """Gradient descent on the mean square error. Returns the losses and this rank's parts."""
    parts, losses = cut(weights, world), []
    for _ in range(steps):
        loss = (forward(x, parts, world) - y).square().mean()
        gradients = torch.autograd.grad(loss, list(parts.values()))
        with torch.no_grad():
            for part, gradient in zip(parts.values(), gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
    return losses, {name: part.detach() for name, part in parts.items()}


def example(seed: int, inner: int = 12) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"up": (inner, 5), "up_bias": (inner,), "down": (3, inner), "down_bias": (3,), "x": (20, 5), "y": (20, 3)}
    made = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return made, made.pop("x"), made.pop("y")


def main() -> None:
    weights, x, y = example(3)
    print("ranks   loss at step 0, 10, 20, 40, 60       down_bias at the end, on rank 0")
    for ranks in (1, 2, 4):
        losses, parts = run_threads(train, ranks, weights, x, y, 61, 0.01)[0]
        curve = "  ".join(f"{losses[step]:6.2f}" for step in (0, 10, 20, 40, 60))
        print(f"{ranks:>5}   {curve}    {'  '.join(f'{number:5.2f}' for number in parts['down_bias'])}")


if __name__ == "__main__":
    main()
