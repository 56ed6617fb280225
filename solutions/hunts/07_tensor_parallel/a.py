"""A feed-forward layer over ranks, with dropout of the inner features and of the output. How far the output spreads should not depend on
the ranks."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def dropped(x: Tensor, rate: float, random: torch.Generator) -> Tensor:
    """x with a share `rate` of its numbers set to 0 and the others scaled up."""
    kept = torch.rand(x.shape, generator=random) >= rate
    return x * kept / (1 - rate)


def forward(world: Communicator, x: Tensor, up: Tensor, down: Tensor, inner_rate: float, output_rate: float, seed: int) -> Tensor:
    """dropout(down(dropout(relu(up(x))))): x [N, D] -> [N, D], the same on all ranks.

    Args:
        up, down: the whole matrices [F, D] and [D, F]; this rank computes F / ranks of the inner features.
        seed: of this call's random numbers. The same seed gives the same output again.
    """
    features = torch.arange(len(up)).chunk(world.size)[world.rank]
    random = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + (1 + world.rank) * 1_000_003)
    hidden = torch.relu(x @ up[features].T)
    hidden = dropped(hidden, inner_rate, own)
    y = hidden @ down[:, features].T
    world.all_reduce(y)
    return dropped(y, output_rate, random)


def main() -> None:
    weights = torch.Generator().manual_seed(0)
    up, down = (torch.rand(shape, generator=weights, dtype=torch.float64) / 8 for shape in ((16, 8), (8, 16)))
    x = torch.ones(4000, 8, dtype=torch.float64)
    print("ranks   mean of the output   its spread   the same on all ranks")
    for ranks in (1, 2, 4):
        outputs = run_threads(forward, ranks, x, up, down, 0.5, 0.1, 1)
        same = all(torch.equal(outputs[0], other) for other in outputs)
        print(f"{ranks:>5}   {outputs[0].mean():>18.2f}   {outputs[0].std(dim=0).mean():>10.2f}   {same}")


if __name__ == "__main__":
    main()
