"""Chapter 06. FlatParam: the parameters of an FSDP unit, flattened and concatenated, in equal shards of which each rank keeps one.

    parameters   a a a a a a b b b c c c c .      . is padding
    ranks        0 0 0 0 0 1 1 1 1 1 2 2 2 2 2    two ranks share b, and rank 2 holds most of c

One operation gathers or reduces all of them, whatever their shapes, and no rank holds more than 1/n of weights, gradients and optimizer
state between two uses (Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP", section 3.2).

Left out on purpose: sharding each matrix by rows, as `fully_shard` does, which needs a copy after each all-gather.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.sharding import Span, make_shard, part_sizes, split_spans
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work


@dataclass
class Slot:
    """A parameter of a model. name: its name in the model. places: the modules and attributes that hold it, several for a tied one."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]


@exercise("06.unshard_unit")
def unshard_unit(whole: Tensor, shard: Tensor, group: Communicator) -> Work:
    """Start the all-gather of an FSDP unit's weights from the ranks' shards.

    The weights that the modules compute with are views of `whole`, made once, and autograd keeps such views for the backward pass. So the
    weights must be gathered into this very tensor. Its storage, the memory behind it and its views, has 0 bytes until now, and
    `whole.untyped_storage().resize_(bytes)` gives it others.

    Args:
        whole: [size * n], of the dtype that is computed in. Its storage is allocated again, and filled.
        shard: [n], what this rank keeps, possibly of a wider dtype: it is rounded before it is sent. Left unchanged.
        group: the ranks that the unit is sharded over. `group.all_gather(whole, part, asynchronous=True)` starts to fill `whole` with the
            ranks' parts, all of one dtype; `part` may be this rank's own place in `whole`.

    Returns:
        The work of the all-gather: `whole` is complete once its `wait()` has returned. The caller computes meanwhile, so do not wait here.

    >>> whole, shard = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    >>> first_two = whole[:2]
    >>> whole.untyped_storage().resize_(0).nbytes()                # as it is between two uses
    0
    >>> unshard_unit(whole, shard, SingleRankCommunicator()).wait()
    >>> first_two
    tensor([1., 2.])
    """


@exercise("06.reshard_unit")
def reshard_unit(
    whole: Tensor, gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype, group: Communicator
) -> tuple[Tensor, Work]:
    """Free a unit's unsharded weights after its backward pass, and start the reduce-scatter of its gradients.

    The weights are freed before memory for the sum is taken: this is the moment at which a rank holds most.

    Args:
        whole: [size * n], the weights. Afterwards its storage has 0 bytes; the tensor itself, and views of it, stay.
        gradients: this rank's gradient of each parameter, in the parameter's shape, in the order in which they lie in `whole`. None for one
            that this rank has not used: other ranks may have, and every rank must send the same number of elements.
        sizes: how many numbers each parameter has; together at most size * n, and the rest is padding.
        dtype: the dtype in which gradients are added and kept.
        group: the ranks that the unit is sharded over. `group.reduce_scatter(part, whole, asynchronous=True)` starts to fill `part` with
            this rank's part of the sum of all ranks' `whole`, both of one dtype; `whole` is undefined afterwards.

    Returns:
        This rank's shard of the sum over the ranks, [n] in `dtype`, on `whole`'s device, with memory of its own: a view of a longer
        buffer would keep all of that. And the work that fills it: it is complete once `wait()` has returned. The gradients are sums over
        tokens, so they are added and never averaged.

    >>> whole, gradients = torch.ones(4), [torch.tensor([[5.0], [6.0]]), None]
    >>> shard, work = reshard_unit(whole, gradients, [2, 1], torch.float64, SingleRankCommunicator())
    >>> work.wait()
    >>> shard, whole.untyped_storage().nbytes()
    (tensor([5., 6., 0., 0.], dtype=torch.float64), 0)
    """


class FlatParam:
    """A flat parameter: several parameters of a unit, all of one dtype, and all trained or all frozen. Each rank of `group` has one shard.

    Args:
        slots: the parameters, in the order in which they are concatenated. In their modules this rank's shards replace them.
        group: the ranks that share them.
        dtype: the dtype in which they are gathered; None for their own.
        device: where the shard is allocated.
        value_of: value_of(name, parameter) -> the full initial value, called for one parameter at a time.

    Attributes:
        shard: [n], this rank's numbers: the weights that the optimizer steps.
        pieces: for each parameter this rank's part of it, a view of its numbers, as a parameter (`make_shard`).
        wholes: for each parameter the one that is computed with, a view of `whole`, which is empty between two uses.
        gradient: [n], the step's gradient so far; the pieces' `grad` are views of it. None for frozen parameters.
        unreduced: for each parameter this rank's whole gradient since the last reduce-scatter, or None.
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
        # `.data` has a version counter of its own: gathering again must not look like a change of a tensor saved for backward.
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
        self.unreduced: list[Tensor | None] = [None] * len(parameters)
        self.gathering: Work | None = None
        self.used = [False] * len(parameters)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded weights, even while they are still being gathered; 0 between two uses."""
        return self.whole.untyped_storage().nbytes()

    def gather(self) -> None:
        """Start the all-gather, unless it has started."""
        if not self.gathered_bytes:
            self.gathering = unshard_unit(self.whole, self.shard, self.group)

    def use_whole(self) -> None:
        """Wait for the all-gather, and put the unsharded weights into the modules."""
        self.wait()
        self.put(self.wholes)

    def release(self) -> None:
        """Free the unsharded weights (reshard), and put the shards back into the modules."""
        self.wait()  # also for an all-gather that was never used: every rank has started it, so every rank must complete it
        self.whole.untyped_storage().resize_(0)
        self.put_shards()

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def put_shards(self) -> None:
        """Put the shards back into the modules; unsharded weights stay in memory."""
        self.put(self.pieces)

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self.holders, parameters, strict=True):
            for module, attribute in places:
                module._parameters[attribute] = parameter

    def accumulate(self) -> None:
        """Add a backward pass's gradients to the unreduced ones, in the shard's dtype, which may be wider than the gathered weights'."""
        for place, parameter in enumerate(self.wholes):
            if parameter.grad is not None:
                so_far, gradient = self.unreduced[place], parameter.grad
                self.unreduced[place] = gradient if so_far is None else so_far.to(self.shard.dtype).add_(gradient)
                parameter.grad = None

    def begin_reduce(self) -> Callable[[], None]:
        """Free the weights, and start the reduce-scatter of the unreduced gradients. Returns a function that completes it."""
        self.release()
        self.accumulate()
        gradients, self.unreduced = self.unreduced, [None] * len(self.wholes)
        self.used = [before or now is not None for before, now in zip(self.used, gradients, strict=True)]
        shard, work = reshard_unit(self.whole, gradients, self.sizes, self.shard.dtype, self.group)

        def finish() -> None:
            work.wait()
            self.add(shard)

        return finish

    def add(self, gradient: Tensor) -> None:
        """Accumulate a backward pass's [n] gradient into the step's. A parameter that one rank holds alone has a gradient only there; one
        that is sharded has a gradient on every rank, which may be empty."""
        if self.gradient is not None and any(piece.grad is not None for piece in self.pieces):
            self.gradient += gradient
            return
        self.gradient = gradient
        for piece, at, sharding in zip(self.pieces, self.places, self.shardings, strict=True):
            if piece.numel() or Span(0, sharding.outer_shape.numel()) not in sharding.parts:
                piece.grad = gradient[at].view(piece.shape)

    def close_step(self, users: Sequence[float]) -> None:
        """Complete the step's gradient. users: how many ranks have used each parameter; one that no rank has used gets no gradient."""
        for piece, count in zip(self.pieces, users, strict=True):
            if not count:
                piece.grad = None
        self.gradient, self.used = None, [False] * len(self.used)


class Unit:
    """An FSDP unit: parameters that are gathered and freed together, usually one `FlatParam`.

    Parameters that differ in trainability, dtype (also by `full_precision`, such as a router's), group or evenness get one of their own, so
    that all ranks lay out the rest alike.

    apart: whether parameters whose gradient is partial over other ranks get a flat of their own.

    awaits_backward: whether a forward pass has left a graph here whose backward pass is still to come. open: whether a backward pass has
    begun here whose gradients are not reduced yet.
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
            # A parameter that another pipeline stage holds too must be sharded alike there, so its flat has nothing else.
            elsewhere = getattr(parameter, "partial_over", None) if apart else None
            uneven = len(set(part_sizes(parameter))) > 1
            gathered_in = dtype if parameter.dtype.is_floating_point and not getattr(parameter, "full_precision", False) else None
            kind = (getattr(parameter, "shared_over", group), gathered_in, parameter.requires_grad, parameter.dtype, elsewhere, uneven)
            kinds.setdefault(kind, []).append(slot)
        self.flats = [FlatParam(kind, over, gathered_in, device, value_of) for (over, gathered_in, *_), kind in kinds.items()]
        self.awaits_backward = self.open = False

    @property
    def gathered_bytes(self) -> int:
        return sum(flat.gathered_bytes for flat in self.flats)

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def use_whole(self) -> None:
        for flat in self.flats:
            flat.use_whole()

    def put_shards(self) -> None:
        for flat in self.flats:
            flat.put_shards()

    def release(self) -> None:
        for flat in self.flats:
            flat.release()

    def accumulate(self) -> None:
        for flat in self.flats:
            flat.accumulate()

    def begin_reduce(self) -> list[Callable[[], None]]:
        self.awaits_backward = self.open = False
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
    """The parameters that are held only by this module and the modules inside it."""
    inside = set(module.modules())
    return [slot for slot in slots if all(holder in inside for holder, _ in slot.places)]
