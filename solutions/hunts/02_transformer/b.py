"""RoPE on queries and keys in bfloat16, far out in a long text. The score of a query and a key depends on how far they are apart, and so it
should be the same wherever the two stand, but for the rounding of their numbers."""

import torch
from torch import Tensor

THETA = 10_000.0


def angles_of(positions: Tensor, size: int) -> Tensor:
    """[positions, size / 2] in float32, radians. A pair of dimensions turns more slowly the higher its number is."""
    pairs = torch.arange(size // 2, dtype=torch.float32)
    return positions.float()[:, None] * THETA ** (-2 * pairs / size)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [positions, size], in its own dtype again. Dimension i is turned with i + size / 2."""
    angles = angles_of(positions, x.shape[-1])
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def scores(queries: Tensor, keys: Tensor, places: Tensor, distance: int) -> Tensor:
    """Each query at its place, and its key `distance` before it: [places], float32."""
    turned, others = rotated(queries, places + distance), rotated(keys, places)
    return (turned.float() * others.float()).sum(dim=-1) * queries.shape[-1] ** -0.5


def example(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """A query and a key that is like it: [size], bfloat16."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(size, generator=random)
    return query.bfloat16(), (query + torch.randn(size, generator=random) / 2).bfloat16()


def main() -> None:
    places = torch.tensor([0, 100, 1_000, 10_000, 100_000])
    print("distance   score at place" + "".join(f"{place:10,}" for place in places.tolist()))
    for distance in (0, 1, 7):
        query, key = example(0, 64)
        found = scores(query.expand(len(places), -1), key.expand(len(places), -1), places, distance)
        print(f"{distance:8}   {'':14}" + "".join(f"{score:10.1f}" for score in found.tolist()))


if __name__ == "__main__":
    main()
