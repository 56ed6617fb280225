"""A router and its experts, trained on the square error and a loss that balances the experts' load, over data ranks and micro-batches.
The losses, the weights and the load should not depend on how a step's rows are shared out."""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


def mixture(x: Tensor, held: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens [B, S, D] -> outputs [B, S, D], probabilities [B, S, E], and which expert each token chose, as 0 and 1 [B, S, E]."""
    probabilities = (x @ held["router"].T).softmax(dim=-1)
    scores, chosen = probabilities.max(dim=-1)
    made = torch.tanh(torch.einsum("bsd,bsod->bso", x, held["experts"][chosen]))
    return made * scores[..., None], probabilities, torch.nn.functional.one_hot(chosen, probabilities.shape[-1])


def balance(probabilities: Tensor, choices: Tensor) -> Tensor:
    """Of each row: E times the sum over the experts of their share of its choices times their mean probability in it. Equal load: 1. [B]"""
    return probabilities.shape[-1] * (choices.double().mean(dim=1) * probabilities.mean(dim=1)).sum(dim=-1)


def train(
    world: Communicator, weights: dict[str, Tensor], x: Tensor, y: Tensor, sizes: list[list[int]], steps: int, rate: float
) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Gradient descent on the mean square error plus 0.02 times the mean of all rows' balance loss.

    Args:
        weights: router [E, D], experts [E, D, D].
        x, y: the step's rows [B, S, D], of all ranks.
        sizes: of each rank, how many rows each of its micro-batches has.

    Returns:
        The square error and how many tokens chose each expert [E], in each step, and all weights.
    """
    held = {name: part.clone().requires_grad_() for name, part in weights.items()}
    before = sum(sum(each) for each in sizes[: world.rank])
    own = slice(before, before + sum(sizes[world.rank]))
    errors, loads = [], []
    for _ in range(steps):
        for part in held.values():
            part.grad = None
        total, load = torch.zeros((), dtype=x.dtype), torch.zeros(len(weights["router"]), dtype=torch.int64)
        for rows, wanted in zip(x[own].split(sizes[world.rank]), y[own].split(sizes[world.rank]), strict=True):
            out, probabilities, choices = mixture(rows, held)
            error = (out - wanted).square().sum() / y.numel()
            balancing = balance(probabilities, choices).sum() / len(x)
            (error + 0.02 * balancing).backward()
            total += error.detach()
            load += choices.sum(dim=(0, 1))
        for each in (total, load, *(part.grad for part in held.values())):
            world.all_reduce(each)
        with torch.no_grad():
            for part in held.values():
                part -= rate * part.grad
        errors.append(total.item())
        loads.append(load)
    return errors, torch.stack(loads), {name: part.detach() for name, part in held.items()}


def example(seed: int, rows: int = 16, experts: int = 4) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"router": (experts, 4), "experts": (experts, 4, 4), "x": (rows, 6, 4), "y": (rows, 6, 4)}
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return weights, weights.pop("x") + 0.5, weights.pop("y")


def main() -> None:
    weights, x, y = example(0)
    print("ranks   micro-batches of each   square error at step 0, 30, 60   tokens of each expert at step 0, 30, 60")
    for ranks, microbatches in ((1, 1), (1, 4), (1, 16), (2, 1), (2, 4), (4, 1)):
        sizes = [[len(x) // ranks // microbatches] * microbatches] * ranks
        errors, loads, _ = run_threads(train, ranks, weights, x, y, sizes, 61, 0.5)[0]
        curve = "  ".join(f"{errors[step]:.4f}" for step in (0, 30, 60))
        shown = "   ".join(str(loads[step].tolist()) for step in (0, 30, 60))
        print(f"{ranks:>5}   {microbatches:>21}   {curve}           {shown}")


if __name__ == "__main__":
    main()
