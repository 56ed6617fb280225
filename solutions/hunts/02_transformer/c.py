"""A model of one attention layer learns random text in which every third letter is the one before it, or the next one of the alphabet. It
predicts the next letter. Then it is asked again, letter by letter, as one writes: what comes later does not exist yet."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LETTERS, WIDTH = 6, 12


def predict(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """ids: [rows, columns]. Logits [rows, columns, LETTERS] of the letter after each place."""
    x = weights["letters"][ids] + weights["places"][: ids.shape[1]]
    queries, keys, values = (x @ weights[name] for name in ("query", "key", "value"))
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    scores = (queries @ keys.mT * WIDTH**-0.5).masked_fill(~seen, float("-inf"))
    return torch.tanh(x + scores.softmax(dim=-1) @ values) @ weights["out"]


def loss_of(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of all letters but the first, in nats, of whole rows at once: []."""
    return F.cross_entropy(predict(ids[:, :-1], weights).flatten(0, 1), ids[:, 1:].flatten())


def loss_by_letter(ids: Tensor, weights: dict[str, Tensor]) -> float:
    """The same, where the model is given nothing but what comes before each letter."""
    losses = [F.cross_entropy(predict(ids[:, :place], weights)[:, -1], ids[:, place]) for place in range(1, ids.shape[1])]
    return sum(loss.item() for loss in losses) / len(losses)


def train(ids: Tensor, weights: dict[str, Tensor], steps: int, rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient descent with momentum. Returns the losses, and the weights."""
    trained = {name: part.clone().requires_grad_() for name, part in weights.items()}
    speed = {name: torch.zeros_like(part) for name, part in weights.items()}
    losses = []
    for _ in range(steps):
        loss = loss_of(ids, trained)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        with torch.no_grad():
            for (name, part), gradient in zip(trained.items(), gradients, strict=True):
                speed[name] = 0.9 * speed[name] + gradient
                part -= rate * speed[name]
        losses.append(loss.item())
    return losses, {name: part.detach() for name, part in trained.items()}


def example(seed: int, rows: int, columns: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Texts, and first weights."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(LETTERS, (rows, columns), generator=random)
    ids[:, 2::3] = (ids[:, 1::3][:, : ids[:, 2::3].shape[1]] + torch.randint(2, (rows, 1), generator=random)) % LETTERS
    draw = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64) / 2  # noqa: E731
    weights = {name: draw(WIDTH, WIDTH) for name in ("query", "key", "value")}
    return ids, weights | {"letters": draw(LETTERS, WIDTH), "places": draw(columns, WIDTH), "out": draw(WIDTH, LETTERS)}


def main() -> None:
    ids, weights = example(0, 48, 12)
    print(f"A blind guess costs {math.log(LETTERS):.1f} nats a letter; two of three letters cannot be known.")
    print("steps   loss, whole rows   loss, letter by letter")
    for steps in (1, 100, 300):
        losses, trained = train(ids, weights, steps, 0.1)
        print(f"{steps:5}   {losses[-1]:16.1f}   {loss_by_letter(ids, trained):22.1f}")


if __name__ == "__main__":
    main()
