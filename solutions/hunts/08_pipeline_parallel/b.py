"""A pipeline of a small language model whose head is its embedding: the first and the last rank both hold that table. The losses and all
weights should not depend on the ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def train(
    world: Communicator, table: Tensor, weights: Tensor, tokens: Tensor, targets: Tensor, microbatches: int, steps: int, rate: float
) -> tuple[list, dict[str, Tensor]]:
    """Gradient descent on the mean cross-entropy of the next token. Returns the losses and what this rank holds.

    Args:
        table: of all tokens, embedding and head [V, D].
        weights: of all layers [L, D, D]; each rank has some of them.
        tokens, targets: [N].
    """
    last = world.size - 1
    ends = world.split("ends", [sorted({0, last}), *([rank] for rank in range(1, last))])
    held = {"layers": weights.tensor_split(world.size)[world.rank].clone().requires_grad_()}
    if world.rank in (0, last):
        held["table"] = table.clone().requires_grad_()
    losses = []
    for _ in range(steps):
        for parameter in held.values():
            parameter.grad = None
        loss, graphs = torch.zeros((), dtype=table.dtype), []
        for ids, wanted in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
            if world.rank > 0:
                received = torch.empty(len(ids), table.shape[1], dtype=table.dtype).requires_grad_()
                world.receive(received, source=world.rank - 1)
            else:
                received = held["table"][ids]
            result = received
            for layer in held["layers"]:
                result = result + torch.tanh(result @ layer.T)
            if world.rank == last:
                result = F.cross_entropy(result @ held["table"].T, wanted, reduction="sum") / len(tokens)
                loss += result.detach()
            else:
                world.send(result.detach(), to=world.rank + 1)
            graphs.append((received, result))
        for received, result in graphs:
            gradient = torch.empty_like(result)
            if world.rank == last:
                gradient.fill_(1.0)
            else:
                world.receive(gradient, source=world.rank + 1)
            result.backward(gradient)
            if world.rank > 0:
                world.send(received.grad, to=world.rank - 1)
        if world.rank in (0, last):
            ends.all_reduce(held["table"].grad)
        with torch.no_grad():
            for parameter in held.values():
                parameter -= rate * parameter.grad
        world.broadcast(loss, root=last)
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in held.items()}


def example(seed: int, layers: int = 3, vocabulary: int = 11, rows: int = 40) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    table, weights = (torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in ((vocabulary, 5), (layers, 5, 5)))
    return table, weights, *(torch.randint(vocabulary, (rows,), generator=random) for _ in range(2))


def main() -> None:
    given = example(1)
    print("ranks   loss at step 0, 10, 40, 100      token 0 in the first rank's table and in the last rank's, at the end")
    for ranks in (1, 2, 3):
        results = run_threads(train, ranks, *given, 4, 101, 0.3)
        curve = "  ".join(f"{results[0][0][step]:.3f}" for step in (0, 10, 40, 100))
        rows = ["  ".join(f"{number:5.2f}" for number in results[rank][1]["table"][0, :3]) for rank in (0, -1)]
        print(f"{ranks:>5}   {curve}     {rows[0]} ...     {rows[1]} ...")


if __name__ == "__main__":
    main()
