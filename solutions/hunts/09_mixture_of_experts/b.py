"""A small mixture of experts with one expert on each rank. Whatever the router decides, a step should end with the loss
and the gradients of one process that has all experts."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import CommunicationError, Communicator
from shared.parallel.comm.threads import run_threads


def travel(rows: Tensor, sent: list[int], received: list[int], group: Communicator) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    group.all_to_all(arrived.split(received), rows.contiguous().split(sent))
    return arrived


class Exchange(torch.autograd.Function):
    """Rows [sum(sent), D] go to the ranks, and [sum(received), D] come from them. Backward: their gradients, the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group: Communicator) -> Tensor:
        ctx.back = received, sent, group
        return travel(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return travel(gradient, *ctx.back), None, None, None


def expert(rows: Tensor, weight: Tensor) -> Tensor:
    """What an expert makes of its rows [n, D]; n may be 0."""
    return torch.tanh(rows @ weight.T)


def step(world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[float, list[int], dict[str, Tensor]]:
    """The square error of all tokens, how many rows each expert gets, and the gradients of below, router and this rank's expert.

    Args:
        weights: whole: below [D, D], router [ranks, D], experts [ranks, D, D].
        x, y: [N, D]; this rank has N / ranks tokens of both.
    """
    held = {"below": weights["below"], "router": weights["router"], "expert": weights["experts"][world.rank]}
    held = {name: part.clone().requires_grad_() for name, part in held.items()}
    exchange = world.split("ep", [list(range(world.size))])
    own_x, own_y = (each.chunk(world.size)[world.rank] for each in (x, y))
    hidden = torch.tanh(own_x @ held["below"].T)
    scores, chosen = (hidden @ held["router"].T).softmax(dim=-1).max(dim=-1)
    order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=world.size)
    coming = torch.empty_like(counts)
    exchange.all_to_all(coming.split(1), counts.split(1))
    sent, received = counts.tolist(), coming.tolist()
    rows = Exchange.apply(hidden[order], sent, received, exchange)
    made = Exchange.apply(expert(rows, held["expert"]), received, sent, exchange)
    loss = (made[order.argsort()] * scores[:, None] - own_y).square().sum()
    gradients = dict(zip(held, torch.autograd.grad(loss, list(held.values()), materialize_grads=True), strict=True))
    total = loss.detach()
    for each in (total, counts, gradients["below"], gradients["router"]):
        world.all_reduce(each)
    return total.item(), counts.tolist(), gradients


def example(seed: int, ranks: int, tokens: int = 12) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"below": (5, 5), "router": (ranks, 5), "experts": (ranks, 5, 5), "x": (tokens, 5), "y": (tokens, 5)}
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return weights, weights.pop("x") + 0.5, weights.pop("y")


def main() -> None:
    print("ranks   batch   what comes of it")
    for ranks in (2, 3):
        for batch in range(6):
            try:
                loss, counts, gradients = run_threads(step, ranks, *example(batch, ranks, 2 * ranks))[0]
                found = f"rows {counts}, loss {loss:.2f}, gradient of length {gradients['expert'].norm():.2f} on rank 0"
            except CommunicationError as error:
                found = str(error)
            print(f"{ranks:>5}   {batch:>5}   {found}")


if __name__ == "__main__":
    main()
