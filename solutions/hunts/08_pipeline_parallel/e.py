"""A pipeline under 1F1B, with one layer on each rank: as many layers as ranks in all. Each layer's gradient should be that of one process,
which has the same layers."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.pipeline.schedules import one_forward_one_backward


def step(world: Communicator, weights: Tensor, inputs: Tensor, wanted: Tensor) -> tuple[float, Tensor]:
    """The square error of all micro-batches, and its gradients for this rank's layers [layers of this rank, D, D].

    Args:
        weights: of all layers [L, D, D].
        inputs, wanted: by micro-batch [M, B, D]. The first rank reads inputs, the last one wanted.
    """
    layers, last = weights.tensor_split(world.size)[world.rank].clone().requires_grad_(), world.size - 1
    loss, graphs, sends = torch.zeros((), dtype=weights.dtype), {}, []
    for kind, number, _ in one_forward_one_backward(world.rank, world.size, len(inputs)):
        if kind == "F":
            received = inputs[number]
            if world.rank > 0:
                received = torch.empty_like(received).requires_grad_()
                world.receive(received, source=world.rank - 1)
            result = received
            for layer in layers:
                result = torch.tanh(result @ layer.T)
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
    return loss.item(), layers.grad


def example(seed: int, layers: int, microbatches: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((layers, 5, 5), (microbatches, 7, 5), (microbatches, 7, 5))
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes)


def main() -> None:
    print("ranks   micro-batches   loss and that of one process      each layer's gradient: how far from that of one process")
    for ranks in (2, 3, 4):
        for microbatches in (1, 2, 3, 8):
            given = example(0, ranks, microbatches)
            results, [(loss, alone)] = run_threads(step, ranks, *given), run_threads(step, 1, *given)
            found = torch.cat([gradient for _, gradient in results])
            far = "  ".join(f"{(mine - right).norm() / right.norm():6.1%}" for mine, right in zip(found, alone, strict=True))
            print(f"{ranks:>5}   {microbatches:>13}   {results[0][0]:>9.3f}   {loss:>9.3f}         {far}")


if __name__ == "__main__":
    main()
