"""A small mixture of experts, trained over data ranks, each with tokens of its own. The experts are spread over some of the ranks, and the
next ranks hold them again. Losses and gradients should depend neither on how many ranks there are nor on how the experts are spread."""

import torch
from torch import Tensor

from shared.moe.parallel.all_to_all import exchange_counts, exchange_rows
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def mixture(x: Tensor, held: dict[str, Tensor], exchange: Communicator) -> Tensor:
    """A layer, and for each token the expert with the largest score, times that score. [N, D] -> [N, D]"""
    hidden = torch.tanh(x @ held["below"].T)
    scores, chosen = (hidden @ held["router"].T).softmax(dim=-1).max(dim=-1)
    order = chosen.argsort(stable=True)
    sent, received, _ = exchange_counts(chosen.bincount(minlength=len(held["router"])), exchange)
    arriving = [sum(row) for row in received]
    rows = exchange_rows(hidden[order], sent, arriving, exchange)
    own = torch.arange(len(held["experts"])).repeat(exchange.size).repeat_interleave(torch.tensor(received).flatten())
    made = torch.tanh(torch.einsum("nd,nod->no", rows, held["experts"][own]))
    return exchange_rows(made, arriving, sent, exchange)[order.argsort()] * scores[:, None]


def train(
    world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor, spread: int, steps: int, rate: float
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """RMSProp on the mean square error of all tokens. Returns the losses, and this rank's parameters and last gradients.

    Args:
        weights: whole: below [D, D], router [E, D], experts [E, D, D].
        x, y: [N, D]; this rank has N / ranks tokens of both.
        spread: over how many ranks the experts are spread; rank r has the part r % spread.
    """
    ranks = range(world.size)
    exchange = world.split("exchange", [[r for r in ranks if r // spread == group] for group in range(world.size // spread)])
    same = world.split("same experts", [[r for r in ranks if r % spread == part] for part in range(spread)])
    held = weights | {"experts": weights["experts"].chunk(spread)[world.rank % spread]}
    held = {name: part.clone().requires_grad_() for name, part in held.items()}
    own_x, own_y = (each.chunk(world.size)[world.rank] for each in (x, y))
    squares, losses = {name: torch.zeros_like(part) for name, part in held.items()}, []
    for _ in range(steps):
        for part in held.values():
            part.grad = None
        loss = (mixture(own_x, held, exchange) - own_y).square().mean()
        loss.backward()
        for name, part in held.items():
            if name == "experts":
                same.all_reduce(part.grad)
                part.grad /= world.size
            else:
                world.all_reduce(part.grad)
                part.grad /= world.size
        with torch.no_grad():
            for name, part in held.items():
                squares[name].lerp_(part.grad.square(), 0.1)
                part -= rate * part.grad / (squares[name].sqrt() + 1e-12)
        total = loss.detach().clone()
        world.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses, {name: part.detach() for name, part in held.items()}, {name: part.grad for name, part in held.items()}


def example(seed: int, experts: int = 4, tokens: int = 48) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"below": (5, 5), "router": (experts, 5), "experts": (experts, 5, 5), "x": (tokens, 5), "y": (tokens, 5)}
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return weights, weights.pop("x"), weights.pop("y")


def main() -> None:
    given = example(0)
    print("ranks   experts over   loss at step 0, 20, 40     length of the gradient at step 0: below, router, expert 0")
    for ranks, spread in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4)):
        losses = run_threads(train, ranks, *given, spread, 41, 0.01)[0][0]
        gradients = run_threads(train, ranks, *given, spread, 1, 0.01)[0][2]
        curve = "  ".join(f"{losses[step]:.4f}" for step in (0, 20, 40))
        lengths = "  ".join(f"{gradient.norm():.4f}" for gradient in (gradients["below"], gradients["router"], gradients["experts"][0]))
        print(f"{ranks:>5}   {spread:>12}   {curve}       {lengths}")


if __name__ == "__main__":
    main()
