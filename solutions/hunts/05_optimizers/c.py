"""SGD with a loss scale and clipping by the global norm. The scale keeps small gradients from becoming 0 in float16, and should not change
what is learned otherwise."""

import torch
from torch import Tensor

INPUTS = 5


def scaled_gradients(weights: list[Tensor], inputs: Tensor, targets: Tensor, scale: float) -> list[Tensor]:
    """Gradients of the mean squared error of two layers, times the scale."""
    held = [weight.clone().requires_grad_() for weight in weights]
    predicted = torch.tanh(inputs @ held[0]) @ held[1]
    loss = (predicted - targets).square().mean()
    return list(torch.autograd.grad(loss * scale, held))


def clipped(gradients: list[Tensor], max_norm: float) -> tuple[list[Tensor], float]:
    """Gradients whose common norm is at most max_norm, and the norm before."""
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
    return [gradient * min(1.0, max_norm / norm) for gradient in gradients], norm


def train(
    weights: list[Tensor], inputs: Tensor, targets: Tensor, scale: float, max_norm: float, steps: int, rate: float
) -> tuple[list[float], list[Tensor]]:
    """Returns the norm of each step's gradients before clipping, whatever the scale, and the weights after the last."""
    norms = []
    for _ in range(steps):
        gradients = scaled_gradients(weights, inputs, targets, scale)
        gradients = [gradient / scale for gradient in gradients]
        gradients, norm = clipped(gradients, max_norm)
        weights = [weight - rate * gradient for weight, gradient in zip(weights, gradients, strict=True)]
        norms.append(norm)
    return norms, weights


def example(seed: int, count: int) -> tuple[list[Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    return [draw(INPUTS, 4), draw(4, 1)], draw(count, INPUTS), draw(count, 1)


def main() -> None:
    weights, inputs, targets = example(0, 16)
    print("loss scale   norm of the first gradients   how far the weights have moved after 20 steps")
    for scale in (1.0, 16.0, 1024.0, 65536.0):
        norms, trained = train(weights, inputs, targets, scale, 1.0, 20, 0.05)
        moved = torch.cat([(new - old).flatten() for new, old in zip(trained, weights)]).norm()
        print(f"{scale:>10.0f}   {norms[0]:>27.4f}   {moved.item():>45.6f}")


if __name__ == "__main__":
    main()
