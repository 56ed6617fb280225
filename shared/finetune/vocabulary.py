"""Chapter 10. Vocabulary extension: a model with more token embeddings than its weights have, new rows at the mean of the old ones.

A token that was added has no trained row. With a random row it would get any probability from the head, often a large one; the mean of all
rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models") gives it about an average one, so that what the model
says of the old tokens hardly moves. The same holds for a head of its own, and for its bias.

Nothing is assembled: the result is on the meta device, and each process reads the rows that it holds (`shared.model.init`).

Training tells equal rows apart, because other tokens stand around them. Where embedding and head are frozen, under an adapter, nothing ever
would: a chat's begin and end tokens would have one logit, and no answer would end. There each new row gets a deviation of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.course.errors import SettingError
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import logical_parameters
from shared.model.transformer import PLAIN, TIED, TIED_TO, TransformerModel

ROWS = 4096  # of a matrix that are read at a time for its mean
GROWING = (TIED_TO, TIED, "head.linear.bias")
Stored = Callable[[Sequence[int], Sequence[int]], Tensor]  # (offsets, sizes) of a slice -> its numbers


class MeanRows:
    """Stored rows, and after them as many as are asked for that are the mean of all stored ones.

    Args:
        stored: reads a slice of the old tensor.
        shape: of the old tensor.
        apart: whether each new row differs from the mean, by normal numbers with the stored rows' deviation in each column. They depend on
            the row's number alone.
    """

    def __init__(self, stored: Stored, shape: Sequence[int], apart: bool = False):
        self.stored, (self.rows, *self.width), self.apart = stored, shape, apart

    def __call__(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        (first, *others), (count, *widths) = offsets, sizes
        old = min(max(self.rows - first, 0), count)
        parts = [self.stored((first, *others), (old, *widths))] if old else []
        if old < count:
            mean, deviation = self.statistics(others, widths)
            new = [mean + deviation * self.draw(row, others, widths) for row in range(first + old, first + count)] if self.apart else None
            parts.append(torch.stack(new) if new else mean.expand(count - old, *widths))
        return torch.cat(parts)

    def statistics(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean and deviation of all stored rows, in the columns of a slice: float32, summed in float64."""
        total, squares = torch.zeros(2, *sizes, dtype=torch.float64)
        for start in range(0, self.rows, ROWS):
            part = self.stored((start, *offsets), (min(ROWS, self.rows - start), *sizes)).double()
            total += part.sum(dim=0)
            squares += part.square().sum(dim=0)
        mean = total / self.rows
        return mean.float(), (squares / self.rows - mean.square()).clamp(min=0).sqrt().float()

    def draw(self, row: int, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A slice of a new row's normal numbers."""
        return part_of(torch.randn(self.width, generator=torch.Generator().manual_seed(row)), offsets, sizes)


def resized(
    model: TransformerModel, config: ModelConfig, builders: Builders = PLAIN, apart: bool = False
) -> TransformerModel:
    """A model of another configuration with the weights of `model`, on the meta device: each parameter carries `stored`.

    Args:
        model: whole, or as `open_pretrained` returns it, on the meta device.
        config: differs from `model.config` in a larger `vocab_size`, or in what no weight depends on.
        builders: what its pieces are made of.
        apart: whether new rows differ from one another (`MeanRows`), for a model whose embedding and head stay frozen.
    """
    with torch.device("meta"):
        made = TransformerModel(config, builders)
    made.token_ids = dict(model.token_ids)
    old, new = logical_parameters(model), logical_parameters(made)
    if odd := sorted(old.keys() ^ new.keys()):
        raise SettingError(f"The weights do not fit this model: {odd[0]} is only in one of the two.")
    for name, parameter in new.items():
        source = old[name]
        stored = getattr(source, "stored", None) or partial(part_of, source.detach())
        grows = name in GROWING and parameter.shape[1:] == source.shape[1:] and len(parameter) > len(source)
        if parameter.shape != source.shape and not grows:
            raise SettingError(
                f"The weights do not fit this model: {name} is {list(parameter.shape)} here and {list(source.shape)} there. "
                "Only the vocabulary can grow."
            )
        parameter.stored = MeanRows(stored, source.shape, apart) if grows else stored
    return made


def part_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
