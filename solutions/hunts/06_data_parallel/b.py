"""A model in a wrapper that adds up gradients over the ranks, as PyTorch's DistributedDataParallel does: its forward pass arms the
exchange, and the end of the backward pass carries it out. All ranks should have the same weights after each step."""

import torch
from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads


class DataParallel(nn.Module):
    """Exchanges the gradients of a backward pass that began with its own forward pass."""

    def __init__(self, module: nn.Module, world: Communicator):
        super().__init__()
        self.module, self.world, self.armed = module, world, False

    def forward(self, inputs: Tensor) -> Tensor:
        self.armed = True
        return self.module(inputs)

    def finish(self) -> None:
        """Add up the gradients, if a forward pass has armed this."""
        if self.armed:
            for weight in self.module.parameters():
                self.world.all_reduce(weight.grad)
        self.armed = False


class Perceptron(nn.Module):
    def __init__(self, features: int, seed: int):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(features, 7, generator=random, dtype=torch.float64) / 2)
        self.down = nn.Parameter(torch.randn(7, generator=random, dtype=torch.float64) / 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.up) @ self.down

    def penalty(self) -> Tensor:
        return 1e-3 * (self.up.square().sum() + self.down.square().sum())


def objective(model: DataParallel, inputs: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """This rank's part of the mean squared error over all rows, and its part of the penalty."""
    result = model(inputs)
    return (result - wanted).square().sum() / rows + model.module.penalty() * len(inputs) / rows


def train(world: Communicator, inputs: Tensor, wanted: Tensor, steps: int, rate: float, seed: int) -> dict[str, Tensor]:
    model = DataParallel(Perceptron(inputs.shape[1], seed), world)
    mine = [rows.tensor_split(world.size)[world.rank] for rows in (inputs, wanted)]
    for _ in range(steps):
        model.zero_grad()
        objective(model, *mine, len(inputs)).backward()
        model.finish()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
    return {name: weight.detach() for name, weight in model.module.named_parameters()}


def example(seed: int, rows: int = 40, features: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=random, dtype=torch.float64)
    return inputs, torch.sin(2 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]


def main() -> None:
    print("ranks   all-reduces of rank 0   first weight of each rank after 100 steps")
    for ranks in (1, 2, 4):

        def run(world: Communicator) -> tuple[int, float]:
            weights = train(world, *example(1), 100, 0.2, seed=3)
            return world.trace.calls()["all_reduce", "world"], weights["down"][0].item()

        results = run_threads(run, ranks)
        print(f"{ranks:>5}   {results[0][0]:>21}   {'  '.join(f'{weight:.4f}' for _, weight in results)}")


if __name__ == "__main__":
    main()
