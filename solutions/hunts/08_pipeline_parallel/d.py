"""A pipeline under 1F1B, with one layer on each rank. Each number of ranks and micro-batches should end with a loss and a gradient."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import CommunicationError, Communicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.pipeline.schedules import one_forward_one_backward


def step(world: Communicator, weights: Tensor, inputs: Tensor, wanted: Tensor) -> tuple[float, Tensor]:
    """The square error of all micro-batches, and its gradient for this rank's weight.

    Args:
        weights: of all ranks [ranks, D, D].
        inputs, wanted: by micro-batch [M, B, D]. The first rank reads inputs, the last one wanted.
    """
    weight, last = weights[world.rank].clone().requires_grad_(), world.size - 1
    loss, graphs = torch.zeros((), dtype=weight.dtype), {}
    sends = []
    for kind, number, _ in one_forward_one_backward(world.rank, world.size, len(inputs)):
        if kind == "F":
            received = inputs[number]
            if world.rank > 0:
                received = torch.empty_like(received).requires_grad_()
                world.receive(received, source=world.rank - 1)
            result = torch.tanh(received @ weight.T)
            if world.rank == last:
                result = (result - wanted[number]).square().sum()
                loss += result.detach()
            else:
                sends.append(world.send(result.detach(), to=world.rank + 1, asynchronous=True))
            graphs[number] = received, result
        else:
            received, result = graphs.pop(number)
            gradient = None
            if world.rank < last:
                gradient = torch.empty_like(result)
                world.receive(gradient, source=world.rank + 1)
            result.backward(gradient)
            if world.rank > 0:
                sends.append(world.send(received.grad, to=world.rank - 1, asynchronous=True))
    for work in sends:
        work.wait()
    world.broadcast(loss, root=last)
    return loss.item(), weight.grad


def example(seed: int, ranks: int, microbatches: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((ranks, 5, 5), (microbatches, 7, 5), (microbatches, 7, 5))
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes)


def main() -> None:
    print("ranks   micro-batches   what comes of it")
    for ranks in (1, 2, 3):
        for microbatches in (1, 2, 4):
            try:
                loss, gradient = run_threads(step, ranks, *example(0, ranks, microbatches))[0]
                found = f"loss {loss:.2f}, gradient of length {gradient.norm():.2f} on rank 0"
            except CommunicationError as error:
                found = str(error)
            print(f"{ranks:>5}   {microbatches:>13}   {found}")


if __name__ == "__main__":
    main()
