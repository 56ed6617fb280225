"""Chapter 06. The parameters of a unit laid end to end and cut into equal shards, of which each rank keeps one.

    parameters   a a a a a a b b b c c c c .      . is padding
    ranks        0 0 0 0 0 1 1 1 1 1 2 2 2 2 2    two ranks share b, and rank 2 holds most of c

One operation gathers or reduces all of them, whatever their shapes, and no rank holds more than 1/n of weights, gradients and optimizer
state between two uses (Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP", section 3.2).

Left out on purpose: cuts by rows of each matrix, as `fully_shard` makes them, which need a copy after each gathering.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.parallel.comm.communicator import Communicator, Work
from shared.parallel.sharding import Span, make_shard, split_spans


@dataclass
class Slot:
    """A parameter of a model. name: in the model. places: the modules that hold it, and as what; a tied one has several."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]


@exercise("06.unshard_unit")
def unshard_unit(whole: Tensor, shard: Tensor, group: Communicator) -> Work:
    """Begin to gather a unit's weights from the ranks' shards.

    The weights that the modules compute with are views of `whole`, made once, and autograd keeps such views for the backward pass. So the
    numbers must come to lie in this very tensor, whose storage has 0 bytes until now.

    Args:
        whole: [size * n], of the dtype that is computed in. Its storage is given its bytes again, and filled.
        shard: [n], what this rank keeps, possibly of a wider dtype: it is rounded before it travels. Left as it is.
        group: the ranks that the unit is cut over. `group.all_gather(whole, part, asynchronous=True)` begins to fill `whole` with the
            ranks' parts, all of one dtype; `part` may be this rank's own place in `whole`.

    Returns:
        The gathering, under way: `whole` is complete once `wait()` of it has returned. Whoever calls this has something to do meanwhile.

    >>> whole, shard = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    >>> first_two = whole[:2]
    >>> whole.untyped_storage().resize_(0).nbytes()                # as it is between two uses
    0
    >>> unshard_unit(whole, shard, SingleRankCommunicator()).wait()
    >>> first_two
    tensor([1., 2.])

    The solution is in solutions/06_data_parallel.py; `course read shared.parallel.data.flat` shows it in place.
    """


@exercise("06.reshard_unit")
def reshard_unit(
    whole: Tensor, gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype, group: Communicator
) -> tuple[Tensor, Work]:
    """After a unit's backward pass: let its whole weights go, and begin to add up its gradients, of which each rank keeps its shard.

    Args:
        whole: [size * n], the weights. Afterwards its storage has 0 bytes; the tensor itself, and views of it, stay.
        gradients: this rank's gradient of each parameter, in the parameter's shape, in the order in which they lie in `whole`. None for one
            that this rank has not used: others may have, and every rank sends equally much.
        sizes: how many numbers each parameter has; together at most size * n, and the rest is padding.
        dtype: what the gradients are added in, and kept in.
        group: the ranks that the unit is cut over. `group.reduce_scatter(part, whole, asynchronous=True)` begins to fill `part` with this
            rank's part of the sum of all ranks' `whole`, both of one dtype; what is in `whole` afterwards is of no use.

    Returns:
        This rank's shard of the sum over the ranks, [n] in `dtype`, on `whole`'s device, and the operation under way that fills it: it is
        complete once `wait()` has returned. The gradients are sums over tokens, so they are added and never averaged.

    >>> whole, gradients = torch.ones(4), [torch.tensor([[5.0], [6.0]]), None]
    >>> shard, work = reshard_unit(whole, gradients, [2, 1], torch.float64, SingleRankCommunicator())
    >>> work.wait()
    >>> shard, whole.untyped_storage().nbytes()
    (tensor([5., 6., 0., 0.], dtype=torch.float64), 0)

    The solution is in solutions/06_data_parallel.py; `course read shared.parallel.data.flat` shows it in place.
    """


class Flat:
    """Some parameters of a unit: all of one dtype, and either all trained or all frozen. Each rank of `group` keeps an equal shard.

    Args:
        slots: the parameters, in the order in which they are laid end to end. Their modules get this rank's pieces in place of them.
        group: the ranks that share them.
        dtype: what they are gathered in; None for their own.
        device: where the shard is to lie.
        value_of: value_of(name, parameter) -> the whole initial value, asked for one parameter at a time.

    Attributes:
        shard: [n], this rank's numbers: the weights that the optimizer steps.
        pieces: for each parameter this rank's part of it, a view of its numbers, as a parameter (`make_shard`).
        wholes: for each parameter the one that is computed with, a view of `whole`, which is empty between two uses.
        gradient: [n], the step's gradient so far; the pieces' `grad` are views of it. None for frozen parameters.
        used: for each parameter, whether this rank has had a gradient for it since `used` was last cleared.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Communicator,
        dtype: torch.dtype | None,
        device: torch.device,
        value_of: Callable[[str, nn.Parameter], Tensor],
    ):
        self.names, self.holders, self.group = [slot.name for slot in slots], [slot.places for slot in slots], group
        parameters = [slot.parameter for slot in slots]
        self.trained = parameters[0].requires_grad
        self.sizes = [parameter.numel() for parameter in parameters]
        self.shard = torch.zeros(-(-sum(self.sizes) // group.size), dtype=parameters[0].dtype, device=device)
        self.whole = torch.empty(group.size * len(self.shard), dtype=dtype or self.shard.dtype, device=device)
        # `.data` counts changes by itself: gathering the same weights again must not look like a change of what autograd has kept.
        views = self.whole.data[: sum(self.sizes)].split(self.sizes)
        self.wholes = [nn.Parameter(view.view(p.shape), self.trained) for view, p in zip(views, parameters, strict=True)]
        self.whole.untyped_storage().resize_(0)
        self.shardings, self.places = [], []
        for parameter, start in zip(parameters, accumulate(self.sizes, initial=0), strict=False):
            ends = [min(max(len(self.shard) * rank - start, 0), parameter.numel()) for rank in range(group.size + 1)]
            self.shardings.append(split_spans(parameter, list(zip(ends, ends[1:], strict=False)), group))
            first, last = (min(max(end + start - len(self.shard) * group.rank, 0), len(self.shard)) for end in self.shardings[-1].here)
            self.places.append(slice(first, last))
        for slot, at, sharding in zip(slots, self.places, self.shardings, strict=True):
            self.shard[at] = sharding.here.of(value_of(slot.name, slot.parameter).detach())
        places = zip(self.places, self.shardings, parameters, strict=True)
        self.pieces = [make_shard(self.shard[at], sharding, p) for at, sharding, p in places]
        self.put(self.pieces)
        self.gradient: Tensor | None = None
        self.gathering: Work | None = None
        self.used = [False] * len(parameters)

    @property
    def gathered_bytes(self) -> int:
        """Of the whole weights, which may still be on their way; 0 between two uses."""
        return self.whole.untyped_storage().nbytes()

    def gather(self) -> None:
        """Begin to gather, if that has not begun."""
        if not self.gathered_bytes:
            self.gathering = unshard_unit(self.whole, self.shard, self.group)

    def use_whole(self) -> None:
        """Wait for the gathering, and let the modules compute with whole weights."""
        self.wait()
        self.put(self.wholes)

    def release(self) -> None:
        """Let the whole weights go; the modules hold pieces again."""
        self.wait()  # for one that was begun and not used: every rank has begun it, so every rank must end it
        self.whole.untyped_storage().resize_(0)
        self.put(self.pieces)

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self.holders, parameters, strict=True):
            for module, attribute in places:
                module._parameters[attribute] = parameter

    def begin_reduce(self) -> Callable[[], None]:
        """Let the weights go, and begin to add up this backward pass's gradients. What is returned waits, and adds them to the step's."""
        self.release()
        gradients = [parameter.grad for parameter in self.wholes]
        self.used = [before or now is not None for before, now in zip(self.used, gradients, strict=True)]
        for parameter in self.wholes:
            parameter.grad = None
        shard, work = reshard_unit(self.whole, gradients, self.sizes, self.shard.dtype, self.group)

        def finish() -> None:
            work.wait()
            self.add(shard)

        return finish

    def add(self, gradient: Tensor) -> None:
        """Take in a backward pass's [n] gradient: on top of the step's, or as its first. A parameter that one rank holds all of has a
        gradient there alone; one that is spread has one on every rank, which may be empty."""
        if self.gradient is not None and any(piece.grad is not None for piece in self.pieces):
            self.gradient += gradient
            return
        self.gradient = gradient
        for piece, at, sharding in zip(self.pieces, self.places, self.shardings, strict=True):
            if piece.numel() or Span(0, sharding.outer_shape.numel()) not in sharding.parts:
                piece.grad = gradient[at].view(piece.shape)

    def close_step(self, users: Sequence[float]) -> None:
        """The step's gradient is complete. users: how many ranks have used each parameter; what nobody has used has no gradient."""
        for piece, count in zip(self.pieces, users, strict=True):
            if not count:
                piece.grad = None
        self.gradient, self.used = None, [False] * len(self.used)


class Unit:
    """An FSDP unit, whose parameters are gathered and freed together: one `Flat`, or several where some are frozen, of another dtype, or shared
    over other ranks.

    apart: whether parameters whose gradient is partial over other ranks get a flat of their own.

    awaited: whether a forward pass has left a graph here whose backward pass is to come. open: whether one has begun to compute its
    gradients, and they are not reduced yet.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Communicator,
        dtype: torch.dtype | None,
        device: torch.device,
        value_of: Callable[[str, nn.Parameter], Tensor],
        apart: bool = False,
    ):
        kinds: dict[tuple, list[Slot]] = {}
        for slot in slots:
            parameter = slot.parameter
            # One that other pipeline stages hold too must be sharded there as here, so it shares its flat with nothing else.
            elsewhere = getattr(parameter, "partial_over", None) if apart else None
            kind = (parameter.requires_grad, parameter.dtype, getattr(parameter, "shared_over", group), elsewhere)
            kinds.setdefault(kind, []).append(slot)
        self.flats = [
            Flat(kind, over, dtype if own.is_floating_point else None, device, value_of) for (_, own, over, _), kind in kinds.items()
        ]
        self.awaited = self.open = False

    @property
    def gathered_bytes(self) -> int:
        return sum(flat.gathered_bytes for flat in self.flats)

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def use_whole(self) -> None:
        for flat in self.flats:
            flat.use_whole()

    def release(self) -> None:
        for flat in self.flats:
            flat.release()

    def begin_reduce(self) -> list[Callable[[], None]]:
        self.awaited = self.open = False
        self.release()
        return [flat.begin_reduce() for flat in self.flats if flat.trained]


def slots_of(model: nn.Module) -> list[Slot]:
    """Each parameter of a model once, in the model's order."""
    slots = {parameter: Slot(name, parameter, []) for name, parameter in model.named_parameters()}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                slots[parameter].places.append((module, attribute))
    return list(slots.values())


def slots_within(slots: Sequence[Slot], module: nn.Module) -> list[Slot]:
    """Those that only this module and the ones inside it hold."""
    inside = set(module.modules())
    return [slot for slot in slots if all(holder in inside for holder, _ in slot.places)]
