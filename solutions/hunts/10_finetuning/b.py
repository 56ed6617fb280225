"""A small network whose frozen weights get low-rank additions, which are trained and then merged into the weights. The outputs should be
the same before the merge, after it, and when the additions have been taken out again and put back."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = dict[str, Tensor]


def adapt(weight: Tensor, rank: int, alpha: float, random: torch.Generator) -> Layer:
    """A frozen weight [out, in] with the factors A [rank, in] and B [out, rank] of an addition, which is 0 at first."""
    lora_a = (2 * torch.rand(rank, weight.shape[1], generator=random, dtype=weight.dtype) - 1) / math.sqrt(weight.shape[1])
    lora_b = torch.zeros(weight.shape[0], rank, dtype=weight.dtype)
    return {"weight": weight.clone(), "A": lora_a, "B": lora_b, "scaling": torch.tensor(alpha / rank), "merged": torch.tensor(False)}


def update(layer: Layer) -> Tensor:
    """What the addition adds to the weight: [out, in]."""
    return layer["scaling"] * (layer["B"] @ layer["A"])


def merge(layer: Layer) -> None:
    """Add the addition to the weight, so that the forward pass has one product a layer. Merging twice changes nothing."""
    if not layer["merged"]:
        layer["weight"] = layer["weight"] + update(layer)
        layer["merged"] = torch.tensor(True)


def unmerge(layer: Layer) -> None:
    """Take the addition out of the weight again."""
    if layer["merged"]:
        layer["weight"] = layer["weight"] - update(layer)
        layer["merged"] = torch.tensor(False)


def apply(x: Tensor, layer: Layer) -> Tensor:
    """[..., in] -> [..., out]"""
    y = F.linear(x, layer["weight"])
    if layer["merged"]:
        return y
    return y + layer["scaling"] * F.linear(F.linear(x, layer["A"]), layer["B"])


def network(x: Tensor, layers: list[Layer]) -> Tensor:
    for layer in layers[:-1]:
        x = torch.tanh(apply(x, layer))
    return apply(x, layers[-1])


def train(layers: list[Layer], x: Tensor, y: Tensor, steps: int, rate: float) -> list[float]:
    """Gradient descent on the square error, of the factors alone. Returns the losses."""
    factors = [(layer, name) for layer in layers for name in ("A", "B")]
    losses = []
    for _ in range(steps):
        for layer, name in factors:
            layer[name] = layer[name].detach().requires_grad_()
        loss = (network(x, layers) - y).square().mean()
        gradients = torch.autograd.grad(loss, [layer[name] for layer, name in factors])
        for (layer, name), gradient in zip(factors, gradients, strict=True):
            layer[name] = layer[name].detach() - rate * gradient
        losses.append(loss.item())
    return losses


def example(seed: int, rank: int, alpha: float, sizes: tuple[int, ...] = (5, 7, 3)) -> tuple[list[Layer], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    layers = [adapt(draw(after, before) / math.sqrt(before), rank, alpha, random) for before, after in zip(sizes, sizes[1:], strict=False)]
    return layers, draw(20, sizes[0]), draw(20, sizes[-1])


def main() -> None:
    print("rank   alpha   square error at first   trained   merged   taken out again   merged again")
    for rank, alpha in ((1, 1.0), (4, 4.0), (4, 8.0), (4, 16.0), (8, 8.0), (8, 4.0), (2, 8.0)):
        layers, x, y = example(0, rank, alpha)
        first = train(layers, x, y, 300, 0.02)[0]
        errors = [(network(x, layers) - y).square().mean().item()]
        for change in (merge, unmerge, merge):
            for layer in layers:
                change(layer)
            errors.append((network(x, layers) - y).square().mean().item())
        trained, merged, without, again = (f"{error:.4f}" for error in errors)
        print(f"{rank:>4}   {alpha:>5.0f}   {first:>21.4f}   {trained:>7}   {merged:>6}   {without:>15}   {again:>12}")


if __name__ == "__main__":
    main()
