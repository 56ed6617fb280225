"""Chapter 06. Pieces: a rank holds of each parameter a range of its flattened numbers, perhaps all of them, perhaps none.

    whole   [0 1 2 3 4 5 6 7 8 9]  of shape [2, 5]
    ranges  (0, 4) on rank 0, (4, 7) on rank 1, (7, 10) on rank 2

ZeRO and FSDP differ only in what is cut so: optimizer state, gradients too, weights too. `Pieces` is what their optimizer is built over: it
has the model's names, and under each of them this rank's numbers, so optimizers, clipping and state by name work as on a whole model.

Left out on purpose: cuts along a dimension of a matrix, which computes with its part (chapter 07); these parts are only stored and updated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.parallel.comm.communicator import Communicator
from shared.totals import Updater

Range = tuple[int, int]  # start and stop within a parameter's flattened numbers


class Cut:
    """How one parameter is cut over the ranks of a group: a `shared.optim.muon.Sharding`.

    Args:
        shape: of the whole parameter.
        ranges: for each rank of `group`, the range that it holds. Together they hold each number once; a range may be empty.
        group: the ranks that share the parameter.

    Raises:
        ValueError: the ranges overlap, leave something out, or are not one for each rank.
    """

    def __init__(self, shape: Sequence[int], ranges: Sequence[Range], group: Communicator):
        self.shape, self.ranges, self.group = torch.Size(shape), tuple(ranges), group
        filled = sorted(each for each in self.ranges if each[0] != each[1])
        ends = [0, *(stop for _, stop in filled)]
        if len(self.ranges) != group.size or [start for start, _ in filled] != ends[:-1] or ends[-1] != self.shape.numel():
            raise ValueError(
                f"A parameter of shape {tuple(shape)} cannot be cut over {group.size} ranks at {list(ranges)}: "
                f"give each rank a range, so that together they hold each of its {self.shape.numel()} numbers once."
            )

    @property
    def here(self) -> Range:
        """This rank's range."""
        return self.ranges[self.group.rank]

    @property
    def is_whole_here(self) -> bool:
        """Whether this rank holds the whole parameter, so that the others hold nothing of it."""
        return self.here == (0, self.shape.numel())

    def cut(self, whole: Tensor) -> Tensor:
        """The whole, in any shape -> this rank's part [stop - start], a view where `whole` is contiguous."""
        start, stop = self.here
        return whole.reshape(-1)[start:stop]

    def gather(self, part: Tensor) -> Tensor:
        """This rank's part -> the whole, in `shape`. Every rank of the group calls it; uneven parts are padded to the longest."""
        longest = max(stop - start for start, stop in self.ranges)
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part.reshape(-1)
        gathered = part.new_empty(self.group.size, longest)
        self.group.all_gather(gathered, padded)
        whole = part.new_empty(self.shape)
        for (start, stop), row in zip(self.ranges, gathered, strict=True):
            whole.view(-1)[start:stop] = row[: stop - start]
        return whole


def make_piece(part: Tensor, cut: Cut, like: nn.Parameter) -> nn.Parameter:
    """A rank's part as a parameter of the optimizer's. It is a view: who steps it changes `part`'s memory.

    A part that is cut carries its `cut` as the attribute `sharding`, by which Muon gathers the whole. A matrix that is whole on this
    rank is like any other, so Muon orthogonalises it here and at once; those who hold nothing of it never have a gradient for it.

    Args:
        part: [stop - start] of `like`'s flattened numbers.
        cut: where they stand in the whole.
        like: the whole parameter, whose role and `requires_grad` the piece takes on.
    """
    piece = nn.Parameter(part.detach().view(cut.shape) if cut.is_whole_here else part.detach(), requires_grad=like.requires_grad)
    if not cut.is_whole_here:
        piece.sharding = cut
    if hasattr(like, "role"):
        piece.role = like.role
    return piece


class Pieces(nn.Module):
    """What one rank holds of a model's parameters, under the model's names: what an optimizer is built over.

    Args:
        pieces: name -> this rank's part, by `make_piece`, or a parameter that every rank holds whole.
        cuts: name -> how it is cut, for those that are; also for the matrices that one rank holds whole.
    """

    def __init__(self, pieces: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut]):
        super().__init__()
        self.pieces, self.cuts = dict(pieces), dict(cuts)
        if strangers := sorted(set(self.cuts) - set(self.pieces)):
            raise ValueError(f"There are cuts for {', '.join(strangers[:3])} and no pieces: give each cut its piece.")

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the whole model, which hold dots and so cannot be registered in this module."""
        return ((f"{prefix}.{name}" if prefix else name, piece) for name, piece in self.pieces.items())

    def norm(self) -> Tensor:
        """The length of the whole gradient, the same number on every rank: [] float64. Parts add over the group that they are cut over;
        what every rank holds counts once. Every rank calls it."""
        device = next(iter(self.pieces.values())).device
        everywhere = [piece.grad for name, piece in self.pieces.items() if name not in self.cuts]
        squares = global_gradient_norm(everywhere).to(device, torch.float64).square()
        for group in dict.fromkeys(cut.group for cut in self.cuts.values()):
            parts = [piece.grad for name, piece in self.pieces.items() if name in self.cuts and self.cuts[name].group is group]
            squares = squares + norm_of_parts(parts, group, device).square()
        return squares.sqrt()


def norm_of_parts(parts: Iterable[Tensor | None], group: Communicator, device: torch.device | str = "cpu") -> Tensor:
    """The length of all ranks' parts laid end to end: [] float64, the same on every rank. Each rank calls it, also one without a part.

    The root of the sum of squares, never the sum of norms: lengths of parts do not add, their squares do. One all-reduce of 8 bytes.
    """
    square = global_gradient_norm(parts).to(device, torch.float64).square()
    group.all_reduce(square)
    return square.sqrt()


def step_on(updater: Updater, optimized: nn.Module) -> Updater:
    """An updater that is called with what the optimizer was built over, whatever the model is that objectives call."""
    return lambda model, optimizer, token_count: updater(optimized, optimizer, token_count)
