"""Two layers with experts, whose load is balanced by a bias, trained over data ranks. To save memory each layer may be computed again in
the backward pass. Neither that nor the number of ranks should change the losses, the load or the bias."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


class Layer:
    """x plus what the chosen expert makes of it, times its score.

    Attributes:
        load: [E], how many tokens chose each expert since it was last set to 0.
        bias: [E], added to the scores where experts are chosen, and nowhere else.
    """

    def __init__(self, router: Tensor, experts: Tensor):
        self.router, self.experts = router.clone().requires_grad_(), experts.clone().requires_grad_()
        self.load, self.bias = (torch.zeros(len(router), dtype=router.dtype) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [N, D] -> [N, D], and how many of them chose each expert."""
        scores = (x @ self.router.T).sigmoid()
        chosen = (scores + self.bias).argmax(dim=-1)
        counts = chosen.bincount(minlength=len(self.bias))
        made = torch.tanh(torch.einsum("nd,nod->no", x, self.experts[chosen]))
        return x + made * scores.gather(-1, chosen[:, None]), counts


def train(
    world: Communicator, weights: list[tuple[Tensor, Tensor]], x: Tensor, y: Tensor, microbatches: int, recompute: list[bool], steps: int
) -> tuple[list[float], Tensor, Tensor]:
    """Gradient descent on the mean square error; after each step a bias falls where an expert had more than an equal load.

    Args:
        weights: router [E, D] and experts [E, D, D] of each layer.
        x, y: [N, D]; this rank has N / ranks rows of both.
        recompute: of each layer, whether its forward pass is computed again in the backward pass.

    Returns:
        The losses, each layer's load in each step [steps, layers, E], and the biases at the end [layers, E].
    """
    layers = [Layer(*each) for each in weights]
    own_x, own_y = (each.chunk(world.size)[world.rank] for each in (x, y))
    losses, loads = [], []
    for _ in range(steps):
        total = torch.zeros((), dtype=x.dtype)
        for hidden, wanted in zip(own_x.chunk(microbatches), own_y.chunk(microbatches), strict=True):
            for layer, again in zip(layers, recompute, strict=True):
                hidden, counts = checkpoint(layer.forward, hidden, use_reentrant=False) if again else layer.forward(hidden)
                layer.load += counts
            loss = (hidden - wanted).square().sum() / y.numel()
            loss.backward()
            total += loss.detach()
        world.all_reduce(total)
        losses.append(total.item())
        for layer in layers:
            world.all_reduce(layer.load)
            layer.bias -= 0.02 * (layer.load / (len(x) / len(layer.bias)) - 1)
        loads.append(torch.stack([layer.load for layer in layers]))
        with torch.no_grad():
            for layer in layers:
                layer.load = torch.zeros_like(layer.load)
                for part in (layer.router, layer.experts):
                    world.all_reduce(part.grad)
                    part -= part.grad
                    part.grad = None
    return losses, torch.stack(loads), torch.stack([layer.bias for layer in layers])


def example(seed: int, rows: int = 48, experts: int = 4) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in ((2, experts, 4), (2, experts, 4, 4), (2, rows, 4))]
    return list(zip(drawn[0], drawn[1], strict=True)), *drawn[2]


def main() -> None:
    given = example(0)
    print("ranks   recomputed   loss at step 0, 40       load of the first layer's experts at step 0, 40         their bias at the end")
    for ranks in (1, 2):
        for recompute in ([False, False], [True, True]):
            losses, loads, biases = run_threads(train, ranks, *given, 2, recompute, 41)[0]
            shown = "   ".join(str(loads[step, 0].int().tolist()) for step in (0, 40))
            bias = "  ".join(f"{number:5.2f}" for number in biases[0])
            print(f"{ranks:>5}   {'yes' if recompute[0] else 'no':>10}   {losses[0]:.4f}  {losses[40]:.4f}   {shown}   {bias}")


if __name__ == "__main__":
    main()
