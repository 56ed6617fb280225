"""A norm and a layer under sequence parallelism, trained over ranks: each rank has the norm for its own positions. The losses and all
weights should not depend on the ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def gathered(part: Tensor, world: Communicator) -> Tensor:
    whole = part.new_empty(len(part) * world.size, part.shape[1])
    world.all_gather(whole, part.contiguous())
    return whole


def scattered(whole: Tensor, world: Communicator) -> Tensor:
    part = whole.new_empty(len(whole) // world.size, whole.shape[1])
    world.reduce_scatter(part, whole.clone())
    return part


class Gather(torch.autograd.Function):
    """All positions from each rank's own. Backward: the sum's own positions."""

    @staticmethod
    def forward(ctx, part: Tensor, world: Communicator) -> Tensor:
        ctx.world = world
        return gathered(part, world)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return scattered(gradient, ctx.world), None


class Scatter(torch.autograd.Function):
    """Own positions of the sum over the ranks. Backward: all positions' gradients."""

    @staticmethod
    def forward(ctx, whole: Tensor, world: Communicator) -> Tensor:
        ctx.world = world
        return scattered(whole, world)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gathered(gradient, ctx.world), None


def train(world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor, steps: int, rate: float) -> tuple[list, dict]:
    """Gradient descent on the square error of x + down(relu(up(norm(x)))). Returns the losses and this rank's parts.

    Args:
        weights: whole: norm [D], up [F, D], down [D, F].
        x, y: [S, D]; this rank has S / ranks positions of both.
    """
    mine = torch.arange(len(weights["up"])).chunk(world.size)[world.rank]
    parts = {"norm": weights["norm"], "up": weights["up"][mine], "down": weights["down"][:, mine]}
    parts = {name: part.clone().requires_grad_() for name, part in parts.items()}
    own_x, own_y = (each.chunk(world.size)[world.rank] for each in (x, y))
    losses = []
    for _ in range(steps):
        hidden = F.rms_norm(own_x, own_x.shape[-1:], parts["norm"], 1e-6)
        hidden = torch.relu(Gather.apply(hidden, world) @ parts["up"].T)
        out = own_x + Scatter.apply(hidden @ parts["down"].T, world)
        loss = (out - own_y).square().sum() / y.numel()
        gradients = dict(zip(parts, torch.autograd.grad(loss, list(parts.values())), strict=True))
        world.all_reduce(gradients["norm"])
        total = loss.detach().clone()
        world.all_reduce(total)
        with torch.no_grad():
            for name, part in parts.items():
                part -= rate * gradients[name]
        losses.append(total.item())
    return losses, {name: part.detach() for name, part in parts.items()}


def example(seed: int, positions: int = 16, inner: int = 12) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"norm": (4,), "up": (inner, 4), "down": (4, inner), "x": (positions, 4), "y": (positions, 4)}
    made = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return made, made.pop("x"), made.pop("y")


def main() -> None:
    weights, x, y = example(1)
    print("ranks   loss at step 0, 20, 100, 200       sum of each rank's norm weights at the end")
    for ranks in (1, 2, 4):
        results = run_threads(train, ranks, weights, x, y, 201, 0.02)
        curve = "  ".join(f"{results[0][0][step]:6.3f}" for step in (0, 20, 100, 200))
        sums = "  ".join(f"{parts['norm'].sum():6.3f}" for _, parts in results)
        print(f"{ranks:>5}   {curve}    {sums}")


if __name__ == "__main__":
    main()
