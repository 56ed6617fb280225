"""An all-reduce in three stages, for machines with two ranks each: the sum within each machine; over the machines, by the first rank of
each; then from the first rank to the second. All ranks should hold the sum of all."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


class Machines:
    """The groups of a world whose ranks 2 m and 2 m + 1 are on machine m."""

    def __init__(self, world: Communicator):
        firsts = range(0, world.size, 2)
        self.world = world
        self.inside = world.split("machine", [(first, first + 1) for first in firsts])
        self.across = world.split("across", [tuple(firsts), tuple(first + 1 for first in firsts)])

    def all_reduce(self, tensor: Tensor) -> None:
        self.inside.all_reduce(tensor)
        if self.inside.rank == 0:
            self.across.all_reduce(tensor)
        self.inside.broadcast(tensor, root=0)


def train(world: Communicator, inputs: Tensor, wanted: Tensor, steps: int, rate: float) -> Tensor:
    """Gradient descent on a linear model, each rank with its rows."""
    machines, weight = Machines(world), torch.zeros(inputs.shape[1], dtype=inputs.dtype)
    own_inputs, own_wanted = (rows.tensor_split(world.size)[world.rank] for rows in (inputs, wanted))
    for _ in range(steps):
        gradient = own_inputs.T @ (own_inputs @ weight - own_wanted)
        machines.all_reduce(gradient)
        weight -= rate * gradient / len(inputs)
    return weight


def reduced(world: Communicator, tensor: Tensor) -> Tensor:
    """The sum over the ranks of what each has in its row of `tensor`."""
    mine = tensor[world.rank].clone()
    Machines(world).all_reduce(mine)
    return mine


def example(seed: int, rows: int = 48, features: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=random, dtype=torch.float64)
    return inputs, inputs @ torch.arange(1.0, features + 1, dtype=torch.float64) + torch.randn(rows, generator=random, dtype=torch.float64)


def main() -> None:
    for ranks in (2, 4, 6):
        digits = 10.0 ** torch.arange(ranks).double().unsqueeze(1)
        sums = run_threads(reduced, ranks, digits)
        print(f"{ranks} ranks, of which rank r brings 10 to the power r:", "  ".join(f"{int(each.item()):0{ranks}}" for each in sums))
    weights = run_threads(train, 4, *example(1), 40, 0.3)
    print("first weight of each of four ranks, after 40 steps:", "  ".join(f"{weight[0]:.4f}" for weight in weights))


if __name__ == "__main__":
    main()
