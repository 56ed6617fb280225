"""Two frozen layers cut over tensor-parallel ranks, the first by output features and the second by input features, with low-rank
additions that are trained. Losses, gradients and factors should not depend on the number of ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

CUT = {"up": 0, "up_B": 0, "down": 1, "down_A": 1}  # the dimension along which the ranks share a matrix; each has all of the others
SUMMED = ("up_A", "down_B")  # whose gradients are added over the ranks


class Sum(torch.autograd.Function):
    """The sum of the ranks' tensors. All ranks go on with the same sum, so each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, world: Communicator) -> Tensor:
        whole = part.clone()
        world.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


def network(x: Tensor, held: dict[str, Tensor], scaling: float, world: Communicator) -> Tensor:
    """[N, D] -> [N, D], the same on every rank, with one sum over the ranks."""
    inner = torch.tanh(F.linear(x, held["up"]) + scaling * F.linear(F.linear(x, held["up_A"]), held["up_B"]))
    own = F.linear(inner, held["down"]) + scaling * F.linear(F.linear(inner, held["down_A"]), held["down_B"])
    return Sum.apply(own, world)


def train(
    world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor, scaling: float, steps: int, rate: float
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Gradient descent of the factors. Returns the losses, and this rank's factors and their last gradients.

    Args:
        weights: whole: up [inner, D], down [D, inner], and the factors up_A, up_B, down_A and down_B of their additions.
        x, y: [N, D], the same on every rank.
    """
    held = {name: part.chunk(world.size, dim=CUT[name])[world.rank] if name in CUT else part for name, part in weights.items()}
    held = {name: part.clone().requires_grad_("_" in name) for name, part in held.items()}
    factors = {name: part for name, part in held.items() if part.requires_grad}
    losses: list[float] = []
    for _ in range(steps):
        for part in factors.values():
            part.grad = None
        loss = (network(x, held, scaling, world) - y).square().mean()
        loss.backward()
        for name in SUMMED:
            world.all_reduce(factors[name].grad)
        with torch.no_grad():
            for part in factors.values():
                part -= rate * part.grad
        losses.append(loss.item())
    return losses, {name: part.detach() for name, part in factors.items()}, {name: part.grad for name, part in factors.items()}


def example(seed: int, inner: int = 8, rank: int = 3) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "up": (inner, 5), "down": (5, inner), "up_A": (rank, 5), "up_B": (inner, rank), "down_A": (rank, inner), "down_B": (5, rank),
        "x": (24, 5), "y": (24, 5),
    }  # fmt: skip
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return weights, weights.pop("x"), weights.pop("y")


def main() -> None:
    given = example(0)
    print("ranks   loss at step 0, 20, 60     length of the first gradient: up A, up B, down A, down B     up A on all ranks")
    for ranks in (1, 2, 4):
        results = run_threads(train, ranks, *given, 2.0, 61, 0.05)
        gradients = [gradients for _, _, gradients in run_threads(train, ranks, *given, 2.0, 1, 0.05)]
        curve = "  ".join(f"{results[0][0][step]:.4f}" for step in (0, 20, 60))
        whole = {name: [of_rank[name] for of_rank in gradients] if name in CUT else [each] for name, each in gradients[0].items()}
        lengths = "  ".join(f"{sum(part.square().sum() for part in parts).sqrt():.4f}" for parts in whole.values())
        same = all(torch.equal(results[0][1]["up_A"], each[1]["up_A"]) for each in results)
        print(f"{ranks:>5}   {curve}     {lengths:<57}   {'the same' if same else 'different'}")


if __name__ == "__main__":
    main()
