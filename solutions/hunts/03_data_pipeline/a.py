"""Documents packed in a row, and a layer of attention. In the row each document should get the logits that it gets alone: packing saves
padding, and changes nothing else."""

import torch
from torch import Tensor

VOCABULARY, FEATURES, PLACES = 11, 8, 32


def pack(documents: list[Tensor], width: int) -> dict[str, Tensor]:
    """Documents side by side: input_ids, the number of the document (-1 on padding) and the position in it, [width] each."""
    row = {name: torch.full((width,), empty) for name, empty in (("input_ids", 0), ("documents", -1), ("positions", 0))}
    start = 0
    for number, ids in enumerate(documents):
        stop = start + len(ids)
        row["input_ids"][start:stop] = ids
        row["documents"][start:stop] = number
        row["positions"][start:stop] = torch.arange(len(ids))
        start = stop
    return row


def visible(row: dict[str, Tensor]) -> Tensor:
    """Which token (row of the result) may look at which (column): [width, width] bool."""
    places = torch.arange(len(row["documents"]))
    earlier = places[None, :] <= places[:, None]
    together = row["documents"][None, :] == row["documents"][:, None]
    return earlier & together


def logits(row: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """[width, VOCABULARY], from one layer of attention."""
    hidden = weights["tokens"][row["input_ids"]] + weights["places"][row["positions"]]
    queries, keys, values = hidden @ weights["queries"], hidden @ weights["keys"], hidden @ weights["values"]
    scores = (queries @ keys.T / FEATURES**0.5).masked_fill(~visible(row), -torch.inf)
    return (hidden + scores.softmax(dim=-1) @ values) @ weights["tokens"].T


def packed_logits(documents: list[Tensor], width: int, weights: dict[str, Tensor]) -> list[Tensor]:
    """The logits of each document, which all stand in one row."""
    found = logits(pack(documents, width), weights)
    return list(found[: sum(map(len, documents))].split([len(ids) for ids in documents]))


def example(seed: int, lengths: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    documents = [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]
    shapes = {"tokens": (VOCABULARY, FEATURES), "places": (PLACES, FEATURES)}
    shapes |= {name: (FEATURES, FEATURES) for name in ("queries", "keys", "values")}
    return documents, {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}


def main() -> None:
    documents, weights = example(0, [5, 7, 4])
    print("document   loss alone   loss in the row   largest change of a logit, when a token of document 0 becomes another one")
    changed = [documents[0].clone(), *documents[1:]]
    changed[0][2] = (changed[0][2] + 1) % VOCABULARY
    packed, after = packed_logits(documents, 20, weights), packed_logits(changed, 20, weights)
    for number, ids in enumerate(documents):
        alone = packed_logits([ids], 20, weights)[0]
        losses = [torch.nn.functional.cross_entropy(each[:-1], ids[1:]).item() for each in (alone, packed[number])]
        print(f"{number:>8}   {losses[0]:>10.3f}   {losses[1]:>15.3f}   {(after[number] - packed[number]).abs().max().item():>25.3f}")


if __name__ == "__main__":
    main()
