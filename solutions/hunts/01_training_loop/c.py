"""Sampling with a temperature and top-k. A low temperature should take the likeliest letter nearly always, a high one all of them."""

import torch
from torch import Tensor

LETTERS = "etaoinsh"


def chances(logits: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The probabilities of the `top_k` likeliest letters, and which they are: [top_k] each."""
    likeliest, ids = logits.topk(top_k)
    return (likeliest / temperature).softmax(dim=-1), ids


def draw(logits: Tensor, temperature: float, top_k: int, number: float) -> int:
    """One letter. number: from 0 to 1, drawn before."""
    weights, ids = chances(logits, temperature, top_k)
    heights = weights.cumsum(dim=0)
    place = int((heights < number * heights[-1]).sum())
    return int(ids[min(place, top_k - 1)])


def write(table: Tensor, first: int, count: int, temperature: float, top_k: int, seed: int) -> list[int]:
    """`count` letters, each drawn after the one before it. table: [letters, letters] logits."""
    random = torch.Generator().manual_seed(seed)
    letters = [first]
    for number in torch.rand(count, generator=random, dtype=torch.float64).tolist():
        letters.append(draw(table[letters[-1]], temperature, top_k, number))
    return letters[1:]


def example(seed: int, size: int) -> Tensor:
    """Logits of each letter after each other one."""
    return 1.5 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def main() -> None:
    table = example(0, len(LETTERS))
    print("temperature   top-k   likeliest letter taken   different pairs   text")
    for temperature, top_k in ((0.1, 8), (0.5, 8), (1.0, 8), (3.0, 8), (3.0, 2)):
        letters = write(table, 0, 400, temperature, top_k, 1)
        taken = sum(int(table[before].argmax()) == after for before, after in zip([0, *letters], letters))
        pairs = len(set(zip([0, *letters], letters)))
        text = "".join(LETTERS[letter] for letter in letters[:24])
        print(f"{temperature:>11}   {top_k:>5}   {taken / 400:>22.0%}   {pairs:>15}   {text}")


if __name__ == "__main__":
    main()
