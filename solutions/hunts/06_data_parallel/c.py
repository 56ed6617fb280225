"""Data parallelism on texts of unequal length: each rank has as many rows, and unequally many tokens that count. The loss is the mean over
all tokens that count, and should not depend on how the rows are dealt out. A step is one all-reduce."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

IGNORED = -100


def step_gradient(world: Communicator, table: Tensor, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a table [V, V] that predicts the next token from one, as means over the tokens of all ranks."""
    weight = table.clone().requires_grad_()
    loss = F.cross_entropy(weight[ids].flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum().to(table.dtype)
    loss.backward()
    sums = torch.cat([weight.grad.flatten(), torch.stack([loss.detach(), count])])
    world.all_reduce(sums)
    sums /= sums[-1].clone()
    return sums[-2], sums[:-2].view_as(table)


def train(world: Communicator, ids: Tensor, targets: Tensor, vocabulary: int, steps: int, rate: float) -> tuple[list[float], Tensor]:
    table, losses = torch.zeros(vocabulary, vocabulary, dtype=torch.float64), []
    mine = [rows.tensor_split(world.size)[world.rank] for rows in (ids, targets)]
    for _ in range(steps):
        loss, gradient = step_gradient(world, table, *mine)
        table -= rate * gradient
        losses.append(loss.item())
    return losses, table


def example(seed: int, rows: int = 8, length: int = 12, vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    """Texts of which the first ones are long and the last ones short."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (rows, length), generator=random)
    targets = (ids * 2 + torch.randint(2, (rows, length), generator=random)) % vocabulary
    for row in range(rows):
        targets[row, max(1, length - row * length // rows) :] = IGNORED
        if row >= rows // 2:
            targets[row] = torch.where(targets[row] != IGNORED, (ids[row] + 3) % vocabulary, IGNORED)
    return ids, targets


def main() -> None:
    ids, targets = example(1)
    sizes = [(rows != IGNORED).sum().item() for rows in targets.tensor_split(4)]
    print("tokens that count, of each of four ranks:", *sizes)
    print("ranks   loss at step 0, 10 and 60      chance of token 3 after token 0, and of token 0")
    for ranks in (1, 2, 4):
        losses, table = run_threads(train, ranks, ids, targets, 5, 61, 2.0)[0]
        curve = "  ".join(f"{losses[step]:.4f}" for step in (0, 10, 60))
        chances = table[0].softmax(dim=0)
        print(f"{ranks:>5}   {curve}       {chances[3]:.4f}  {chances[0]:.4f}")


if __name__ == "__main__":
    main()
