"""Muon's direction for a batch of experts: Newton-Schulz pushes the singular values of each expert's gradient towards 1, so that every
expert moves equally far, however few tokens it has had."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS = 5


def orthogonalized(gradients: Tensor) -> Tensor:
    """[experts, rows, columns] in the same shape, with singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = gradients.shape[-2] > gradients.shape[-1]
    x = gradients.mT if tall else gradients
    x = x / x.square().sum(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def train(weights: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """Muon's steps without momentum on weights [experts, rows, columns], with given gradients. Returns the new weights."""
    rows, columns = weights.shape[-2:]
    scale = max(1, rows / columns) ** 0.5
    for gradient in gradients:
        weights = weights - rate * scale * orthogonalized(gradient)
    return weights


def example(seed: int, sizes: list[float], rows: int = 6, columns: int = 4) -> Tensor:
    """Gradients of experts, of the given sizes: [experts, rows, columns]."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(sizes), rows, columns, generator=random, dtype=torch.float64)
    return drawn * torch.tensor(sizes, dtype=torch.float64)[:, None, None]


def main() -> None:
    print("sizes of the gradients        how far each of the experts moves in one step of rate 0.1")
    for sizes in ([1.0, 1.0, 1.0], [1.0, 0.1, 0.1], [1.0, 0.01, 0.0001]):
        gradients = example(0, sizes)
        moved = train(torch.zeros_like(gradients), [gradients], 0.1)
        far = moved.norm(dim=(-2, -1)).tolist()
        print(f"{', '.join(map(str, sizes)):<28}  {'   '.join(f'{each:.3f}' for each in far)}")


if __name__ == "__main__":
    main()
