"""Attention with eight query heads, of which neighbours share a key-value head. A model whose eight key-value heads are copies, one for
each query head, is the same function with more numbers: so the outputs of the two should not differ."""

import torch
from torch import Tensor

HEADS, SIZE, WIDTH = 8, 4, 16  # query heads, numbers of each, numbers of a token


def cut(x: Tensor) -> Tensor:
    """[positions, heads * SIZE] as [heads, positions, SIZE]."""
    return x.unflatten(-1, (-1, SIZE)).transpose(0, 1)


def attention(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """x: [positions, WIDTH]. Causal attention, with as many key-value heads as the weights have."""
    queries, keys, values = (cut(x @ weights[name].T) for name in ("query", "key", "value"))
    group = len(queries) // len(keys)
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = queries @ keys.mT * SIZE**-0.5
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ values
    return mixed.transpose(0, 1).flatten(1) @ weights["out"].T


def with_own_heads(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same function with a key-value head for each query head: copies of the shared ones."""
    copies = {}
    for name in ("key", "value"):
        heads = weights[name].unflatten(0, (-1, SIZE))
        copies[name] = heads.repeat_interleave(HEADS // len(heads), dim=0).flatten(0, 1)
    return weights | copies


def example(seed: int, shared: int, positions: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A text, and weights with that many key-value heads."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    weights = {"query": draw(HEADS * SIZE, WIDTH), "key": draw(shared * SIZE, WIDTH), "value": draw(shared * SIZE, WIDTH)}
    return draw(positions, WIDTH), weights | {"out": draw(WIDTH, HEADS * SIZE) / 4}


def main() -> None:
    print("key-value heads   size of the output   how far it is from the output of the model with own heads")
    for shared in (8, 4, 2, 1):
        x, weights = example(0, shared, 12)
        found, own = attention(x, weights), attention(x, with_own_heads(weights))
        print(f"{shared:15}   {found.square().mean().sqrt():18.2f}   {(found - own).square().mean().sqrt():.2f}")


if __name__ == "__main__":
    main()
