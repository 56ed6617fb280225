"""A gated layer whose gate and up matrices are stored as one, trained over ranks. A trained model should work on any number of ranks."""

import torch
import torch.nn.functional as F
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


def places(inner: int, world: Communicator) -> tuple[Tensor, Tensor]:
    """Which rows of gate_up [2 F, D] and which columns of down [D, F] this rank has. Rows 0 to F - 1 of gate_up are the gate."""
    columns = torch.arange(inner).chunk(world.size)[world.rank]
    rows = torch.cat([columns, inner + columns])
    return rows, columns


def forward(x: Tensor, gate_up: Tensor, down: Tensor, world: Communicator) -> Tensor:
    """down(silu(gate(x)) * up(x)) with this rank's parts: [N, D] -> [N, D], the same on all ranks."""
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return SumOverRanks.apply((F.silu(gate) * up) @ down.T, world)


def train(world: Communicator, gate_up: Tensor, down: Tensor, x: Tensor, y: Tensor, steps: int, rate: float) -> tuple[list, Tensor, Tensor]:
    """Gradient descent from whole matrices, cut over the ranks. Returns the losses and the whole trained matrices, joined again."""
    rows, columns = places(down.shape[1], world)
    parts, losses = [gate_up[rows].clone().requires_grad_(), down[:, columns].clone().requires_grad_()], []
    for _ in range(steps):
        loss = (forward(x, *parts, world) - y).square().mean()
        gradients = torch.autograd.grad(loss, parts)
        with torch.no_grad():
            for part, gradient in zip(parts, gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
    whole_gate_up, whole_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    whole_gate_up[rows], whole_down[:, columns] = (part.detach() for part in parts)
    world.all_reduce(whole_gate_up)
    world.all_reduce(whole_down)
    return losses, whole_gate_up, whole_down


def example(seed: int, inner: int = 16) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((2 * inner, 6), (6, inner), (40, 6), (40, 6))
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes)


def main() -> None:
    gate_up, down, x, y = example(0)
    trained = {ranks: run_threads(train, ranks, gate_up, down, x, y, 400, 0.1)[0] for ranks in (1, 2, 4)}
    print("ranks        loss at step 0, 100, 399     the trained model's loss on 1, 2 and 4 ranks")
    for ranks, (losses, *matrices) in trained.items():
        again = [run_threads(train, other, *matrices, x, y, 1, 0.1)[0][0][0] for other in (1, 2, 4)]
        curve, tried = "  ".join(f"{losses[step]:5.2f}" for step in (0, 100, 399)), "  ".join(f"{loss:5.2f}" for loss in again)
        print(f"{ranks}            {curve}         {tried}")


if __name__ == "__main__":
    main()
