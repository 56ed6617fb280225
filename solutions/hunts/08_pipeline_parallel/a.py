"""A pipeline with one layer on each rank, trained on a step's micro-batches. The losses, gradients and weights should not depend on how
many micro-batches a step's rows are cut into."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def accumulate(world: Communicator, layers: list[Tensor], x: Tensor, y: Tensor, sizes: list[int]) -> Tensor:
    """Leave in each layer's grad the gradient of the mean square error of a step. Returns that error, on all ranks.

    Args:
        layers: this rank's [D, D].
        x, y: the step's rows [N, D].
        sizes: how many rows each micro-batch has.
    """
    last, loss, graphs = world.size - 1, torch.zeros((), dtype=x.dtype), []
    for rows, wanted in zip(x.split(sizes), y.split(sizes), strict=True):
        received = rows
        if world.rank > 0:
            received = torch.empty_like(rows).requires_grad_()
            world.receive(received, source=world.rank - 1)
        result = received
        for layer in layers:
            result = torch.tanh(result @ layer.T)
        if world.rank == last:
            result = F.mse_loss(result, wanted) * (len(rows) / len(x))
            loss += result.detach()
        else:
            world.send(result.detach(), to=world.rank + 1)
        graphs.append((received, result))
    for received, result in graphs:
        gradient = None
        if world.rank < last:
            gradient = torch.empty_like(result)
            world.receive(gradient, source=world.rank + 1)
        result.backward(gradient)
        if world.rank > 0:
            world.send(received.grad, to=world.rank - 1)
    world.broadcast(loss, root=last)
    return loss


def train(world: Communicator, weights: Tensor, x: Tensor, y: Tensor, sizes: list[int], steps: int, rate: float) -> tuple[list, ...]:
    """Gradient descent. Returns the losses, and this rank's layers with their last gradients."""
    layers = [weight.clone().requires_grad_() for weight in weights.tensor_split(world.size)[world.rank]]
    losses = []
    for _ in range(steps):
        for layer in layers:
            layer.grad = None
        losses.append(accumulate(world, layers, x, y, sizes).item())
        with torch.no_grad():
            for layer in layers:
                layer -= rate * layer.grad
    return losses, [layer.detach() for layer in layers], [layer.grad for layer in layers]


def example(seed: int, layers: int = 2, rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in ((layers, 6, 6), (rows, 6), (rows, 6)))


def main() -> None:
    weights, x, y = example(0)
    print("micro-batches   loss at step 0, 10, 40, 100         the last layer's gradient at step 0")
    for microbatches in (1, 2, 4, 8):
        sizes = [len(x) // microbatches] * microbatches
        losses = run_threads(train, 2, weights, x, y, sizes, 101, 1.0)[0][0]
        gradients = run_threads(train, 2, weights, x, y, sizes, 1, 1.0)[1][2]
        curve = "  ".join(f"{losses[step]:.4f}" for step in (0, 10, 40, 100))
        print(f"{microbatches:>13}   {curve}      {gradients[0].norm():.5f}")


if __name__ == "__main__":
    main()
