"""The cross-entropy of logits that are cut over ranks by tokens. Every rank should have the loss and the gradient of one process."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def loss_and_gradient(world: Communicator, x: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of x @ head.T [N, V] with targets [N], and its gradient for x [N, D], both the same on all ranks.

    Args:
        head: the whole matrix [V, D]; this rank computes the logits of its tokens only.
    """
    tokens = torch.arange(len(head)).tensor_split(world.size)[world.rank]
    logits = x @ head[tokens].T
    largest = logits.amax(dim=-1)
    world.all_reduce(largest, op="max")
    exponentials = (logits - largest[:, None]).exp()
    here = (targets >= tokens[0]) & (targets <= tokens[-1])
    column = (targets - tokens[0]).masked_fill(~here, 0)[:, None]
    chosen = logits.gather(1, column)[:, 0].masked_fill(~here, 0)
    both = torch.stack([exponentials.sum(dim=-1), chosen])
    world.all_reduce(both)
    total, chosen = both
    error = exponentials / total[:, None]  # softmax - one_hot(target), of this rank's tokens
    error.scatter_add_(1, column, -here.to(error.dtype)[:, None])
    gradient = error @ head[tokens]
    world.all_reduce(gradient)
    return (total.log() + largest - chosen).sum(), gradient


def example(seed: int, scale: float, vocabulary: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, head = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((6, 4), (vocabulary, 4)))
    return x, head * scale, torch.randint(vocabulary, (6,), generator=random)


def main() -> None:
    print("largest logit   loss in one process   on rank 0 and rank 1 of two     length of the gradient, one process and two ranks")
    for scale in (0.01, 1.0, 3.0, 10.0):
        x, head, targets = example(0, scale)
        [(whole, gradient)] = run_threads(loss_and_gradient, 1, x, head, targets)
        two = run_threads(loss_and_gradient, 2, x, head, targets)
        losses = "   ".join(f"{loss:8.2f}" for loss, _ in two)
        lengths = f"{gradient.norm():8.2f}   {two[0][1].norm():8.2f}"
        print(f"{(x @ head.T).max():>13.2f}   {whole:>19.2f}   {losses:>27}     {lengths}")


if __name__ == "__main__":
    main()
