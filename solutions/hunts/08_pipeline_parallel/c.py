"""A pipeline under 1F1B, with one layer on each rank and its backward pass by hand. What a rank keeps should not depend on how many
micro-batches a step has: 1F1B keeps at most as many as there are ranks from this one to the last."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.comm.trace import Work
from shared.parallel.pipeline.schedules import one_forward_one_backward


def forward(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight.T)


def backward(upstream: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from y's."""
    through = upstream * (y > 0)
    return through @ weight, through.T @ x


def step(world: Communicator, weights: Tensor, inputs: Tensor, wanted: Tensor) -> tuple[float, Tensor, int]:
    """Half the square error of all micro-batches and this rank's gradient, and the most bytes that this rank kept for backward passes.

    Args:
        weights: of all ranks [ranks, D, D].
        inputs, wanted: by micro-batch [M, B, D]. The first rank reads inputs, the last one wanted.
    """
    weight, last, microbatches = weights[world.rank], world.size - 1, len(inputs)
    gradient, loss, most = torch.zeros_like(weight), torch.zeros((), dtype=weight.dtype), 0
    kept: list = [None] * microbatches
    under_way: dict[int, Work] = {}

    def send(tensor: Tensor, to: int) -> None:
        if to in under_way:
            under_way[to].wait()
        under_way[to] = world.send(tensor, to=to, asynchronous=True)

    for kind, number, _ in one_forward_one_backward(world.rank, world.size, microbatches):
        if kind == "F":
            x = inputs[number]
            if world.rank > 0:
                x = torch.empty_like(x)
                world.receive(x, source=world.rank - 1)
            y = forward(x, weight)
            if world.rank == last:
                loss += (y - wanted[number]).square().sum() / 2
            else:
                send(y, world.rank + 1)
            kept[number] = x, y
            most = max(most, sum(tensor.nbytes for pair in kept if pair for tensor in pair))
        else:
            x, y = kept[number]
            kept[number] = None
            upstream = y - wanted[number] if world.rank == last else torch.empty_like(y)
            if world.rank < last:
                world.receive(upstream, source=world.rank + 1)
            down, own = backward(upstream, x, y, weight)
            gradient += own
            if world.rank > 0:
                send(down, world.rank - 1)
    for work in under_way.values():
        work.wait()
    world.broadcast(loss, root=last)
    return loss.item(), gradient, most


def example(seed: int, ranks: int, microbatches: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((ranks, 8, 8), (microbatches, 16, 8), (microbatches, 16, 8))
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes)


def main() -> None:
    print("rank 1 of 4, 4 micro-batches: ", *(f"{kind}{number}" for kind, number, _ in one_forward_one_backward(1, 4, 4)))
    print("micro-batches   loss of each   KB kept at the most on rank 0, 1, 2, 3")
    for microbatches in (2, 4, 8, 16):
        results = run_threads(step, 4, *example(0, 4, microbatches))
        kept = "  ".join(f"{most / 1024:5.1f}" for _, _, most in results)
        print(f"{microbatches:>13}   {results[0][0] / microbatches:>12.3f}   {kept}")


if __name__ == "__main__":
    main()
