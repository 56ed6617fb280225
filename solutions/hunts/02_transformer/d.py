"""A bigram model whose embedding is its head as well: one matrix, used twice. A file holds it once. A model that is saved and loaded again
should have the loss that it had."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS, WIDTH = 20, 8
State = dict[str, Tensor]


def new_model(embedding: Tensor, middle: Tensor) -> State:
    """A model with these weights, as leaves of a graph: "embedding" [WORDS, WIDTH], "middle" [WIDTH, WIDTH], and "head"."""
    model = {"embedding": embedding.detach().clone().requires_grad_(), "middle": middle.detach().clone().requires_grad_()}
    model["head"] = model["embedding"]
    return model


def loss_of(model: State, pairs: Tensor) -> Tensor:
    """The mean cross-entropy of each pair's second word after its first: []."""
    hidden = torch.tanh(F.embedding(pairs[:, 0], model["embedding"]) @ model["middle"])
    return F.cross_entropy(hidden @ model["head"].T, pairs[:, 1])


def train(model: State, pairs: Tensor, steps: int, rate: float) -> list[float]:
    """Gradient descent, in place. Returns the losses before each step."""
    losses = []
    weights = list({id(weight): weight for weight in model.values()}.values())  # each tensor once
    for _ in range(steps):
        loss = loss_of(model, pairs)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= rate * gradient
        losses.append(loss.item())
    return losses


def saved(model: State) -> State:
    """What a file of the model holds."""
    return {name: model[name].detach().clone() for name in ("embedding", "middle")}


def loaded(file: State) -> State:
    return new_model(file["embedding"], file["middle"])


def example(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of words, of which the second mostly follows from the first, and first weights: embedding, middle."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(WORDS, (count,), generator=random)
    second = (3 * first + torch.randint(2, (count,), generator=random)) % WORDS
    draw = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    return torch.stack([first, second], dim=1), draw(WORDS, WIDTH), draw(WIDTH, WIDTH) / 2


def main() -> None:
    pairs, embedding, middle = example(0, 200)
    print(f"A blind guess costs {math.log(WORDS):.1f} nats a word.")
    print("steps   loss of the model   loss when saved and loaded   loss after 100 more steps from there")
    for steps in (1, 30, 100):
        model = new_model(embedding, middle)
        train(model, pairs, steps, 1.0)
        again = loaded(saved(model))
        before = loss_of(again, pairs).item()
        train(again, pairs, 100, 1.0)
        print(f"{steps:5}   {loss_of(model, pairs).item():17.2f}   {before:26.2f}   {loss_of(again, pairs).item():36.2f}")


if __name__ == "__main__":
    main()
