"""A run that is saved and resumed in the middle. A new process makes its optimizer anew, and may list the parameters in another order:
weights with decay first, say, where they once came as the model has them. The loss should not notice."""

import random

Vector = list[float]
Weights = dict[str, Vector]


def loss_and_gradients(weights: Weights, targets: Weights) -> tuple[float, Weights]:
    """Half the squared distance from the targets; each parameter has a steepness of its own."""
    steepness = {name: 0.2 + 0.4 * number for number, name in enumerate(sorted(weights))}
    away = {name: [w - t for w, t in zip(weights[name], targets[name], strict=True)] for name in weights}
    loss = sum(steepness[name] * sum(a * a for a in values) / 2 for name, values in away.items())
    return loss, {name: [steepness[name] * a for a in values] for name, values in away.items()}


class Momentum:
    """SGD with momentum. velocities: what each parameter has been moving by."""

    def __init__(self, weights: Weights, order: list[str], rate: float = 0.1, momentum: float = 0.9):
        self.weights, self.order, self.rate, self.momentum = weights, order, rate, momentum
        self.velocities: dict[str, Vector] = {}

    def step(self, gradients: Weights) -> None:
        for name in self.order:
            velocity = self.velocities.setdefault(name, [0.0] * len(gradients[name]))
            for place, gradient in enumerate(gradients[name]):
                velocity[place] = self.momentum * velocity[place] + gradient
                self.weights[name][place] -= self.rate * velocity[place]

    def state(self) -> dict:
        """What a checkpoint keeps of the optimizer."""
        return {name: list(self.velocities[name]) for name in self.order if name in self.velocities}

    def load(self, state: dict) -> None:
        self.velocities = {name: list(velocity) for name, velocity in state.items()}


def train(weights: Weights, targets: Weights, optimizer: Momentum, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss, gradients = loss_and_gradients(weights, targets)
        optimizer.step(gradients)
        losses.append(loss)
    return losses


def resumed_run(
    weights: Weights, targets: Weights, before: int, after: int, first: list[str], second: list[str]
) -> tuple[list[float], Weights]:
    """Losses and weights of a run that is saved after `before` steps and resumed by an optimizer with another order. `weights` stay."""
    weights = {name: list(values) for name, values in weights.items()}
    optimizer = Momentum(weights, first)
    losses = train(weights, targets, optimizer, before)
    saved = ({name: list(values) for name, values in weights.items()}, optimizer.state())
    weights = {name: list(values) for name, values in saved[0].items()}
    optimizer = Momentum(weights, second)
    optimizer.load(saved[1])
    return losses + train(weights, targets, optimizer, after), weights


def example(seed: int, names: list[str], size: int) -> tuple[Weights, Weights]:
    drawn = random.Random(seed)
    return tuple({name: [drawn.uniform(-2, 2) for _ in range(size)] for name in names} for _ in range(2))


def main() -> None:
    names = ["embedding", "attention", "norm", "head"]
    weights, targets = example(0, names, 3)
    whole, _ = resumed_run(weights, targets, 24, 0, names, names)
    print("order of the parameters in the resumed process   loss of step 12, 13, 14, 18, 24   (never interrupted:", end=" ")
    print(*(f"{whole[step - 1]:.4f}" for step in (12, 13, 14, 18, 24)), sep=", ", end=")\n")
    for title, second in (("the same", names), ("the other way round", names[::-1]), ("sorted by name", sorted(names))):
        losses, _ = resumed_run(weights, targets, 12, 12, names, second)
        print(f"{title:>46}  ", ", ".join(f"{losses[step - 1]:.4f}" for step in (12, 13, 14, 18, 24)))


if __name__ == "__main__":
    main()
