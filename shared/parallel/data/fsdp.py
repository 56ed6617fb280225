"""Chapter 06. Fully sharded data parallelism (FSDP, ZeRO-3): weights are whole only where and while they are computed with.

    forward     gather unit 0, compute, let go; gather unit 1, compute, let go; ...
    backward    gather the last unit, compute, let go and reduce-scatter its gradients; gather the one before it; ...

A unit is a block; embedding, last norm and head are one together, which is whole throughout. Each rank sees its own share of the batch,
and the numbers are those of one process: only what is held is cut (Rajbhandari et al. 2020; Zhao et al. 2023, section 3).

    moved per step, of P parameters:  2 P gathered and P reduced, half as much again as an all-reduce, which is one of each

While a unit computes, the next one is gathered. Every micro-batch reduces its gradients, so a rank never holds more than a unit of whole
gradients; replicas of the whole (axis dp) add their shards at the last micro-batch only.

Left out on purpose: keeping whole gradients over the micro-batches, which would save P moved for each and hold P; units other than these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shared.model.context import AttentionContext
from shared.model.init import local_initial_value
from shared.parallel.data.engine import DataEngine
from shared.parallel.data.flat import Flat, Unit, slots_of, slots_within
from shared.parallel.mesh import Mesh


class FullySharded(DataEngine):
    """A model whose parameters are cut over `mesh.fsdp`, in place: between two uses its modules hold this rank's pieces.

    Args:
        model: a `TransformerModel`, the same on every rank, whose parameters that are not to be trained are frozen already. One on the meta
            device is too large for a rank: it gets its memory and its initial weights here, one parameter after the other.
        mesh: `reshard_after_forward` and `prefetch` of its configuration are read.
        dtype: what blocks are gathered in; None for the weights' own. The run then computes under autocast with that dtype, which would
            round the same weights, and keep the rounded copies of all blocks until the backward pass. The ends of the model are gathered
            as they are, so that the stream between the blocks is not rounded either. Gradients are added in the weights' own dtype.
        device: of the pieces of a model on the meta device.
        seed: of the initial weights of such a model.

    Attributes:
        model, optim_params: the model. Its `named_parameters` are this rank's pieces under the names of the whole.
        root: what stands around the blocks. units: all, the root first, then the blocks in the order of the forward pass.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", seed: int = 0):
        super().__init__(model, mesh.loss)
        self.mesh = mesh
        self.keeps, self.ahead = not mesh.config.reshard_after_forward, mesh.config.prefetch
        stacks = [stack for stack in (model.encoder, model.stack) if stack is not None]
        blocks = [block for stack in stacks for block in stack.blocks.values()]
        slots = slots_of(model)
        of_blocks = [slots_within(slots, block) for block in blocks]
        taken = {slot.name for slot in chain(*of_blocks)}
        make = partial(Unit, group=mesh.fsdp, device=device_of(model, device), value_of=partial(first_value, model, seed))
        self.root = make([slot for slot in slots if slot.name not in taken], dtype=None, apart=True)
        self.units = [self.root, *(make(of_block, dtype=dtype) for of_block in of_blocks)]
        self.unit_of = dict(zip(blocks, self.units[1:], strict=True))
        self.reducing: list[Callable[[], None]] = []
        self.flats: list[Flat] = []
        self.keeps_always = False
        for stack in stacks:
            stack.run_block = partial(self.run_block, stack.run_block)
        model.compile = partial(compile_each, blocks)
        model.register_forward_pre_hook(self.before_forward)
        model.register_forward_hook(self.after_forward)

    # A forward pass.

    def before_forward(self, model: nn.Module, inputs: tuple) -> None:
        self.reduce_rest()
        self.mesh.fsdp.trace.phase = "forward"
        self.use(self.root)

    def run_block(self, inner: Callable[..., Tensor], block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
        """A `run_block`: gather, compute as it was done before (`inner`, which may recompute), let go."""
        unit = self.unit_of[block]
        self.use(unit)
        if torch.is_grad_enabled():
            x = BeforeIt.apply(x, partial(self.after_backward, unit))
        with autocast_without_cache(x.device.type):
            x = inner(block, x, context)
        if x.requires_grad and torch.is_grad_enabled():
            unit.awaited = True
            x.register_hook(partial(self.before_backward, unit))
        if not (self.keeps_always or (self.keeps and unit.awaited)):
            unit.release()
        return x

    def after_forward(self, model: nn.Module, inputs: tuple, output: Any) -> None:
        results = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        for tensor in results:
            self.root.awaited = True
            tensor.register_hook(partial(self.before_backward, self.root))
        if not results:
            self.reduce_rest()

    # A backward pass.

    def before_backward(self, unit: Unit, gradient: Tensor) -> None:
        """The gradient of what a unit has computed is there."""
        self.mesh.fsdp.trace.phase = "backward"
        unit.open = True
        self.use(unit, backward=True)

    def after_backward(self, unit: Unit) -> None:
        """Everything in a unit has its gradient. Those of the unit before are waited for first, so that those of two are held at most."""
        self.wait_for_gradients()
        self.reducing = unit.begin_reduce()

    def use(self, unit: Unit, backward: bool = False) -> None:
        """Let a unit compute with whole weights, and begin to gather those that come next."""
        order = [self.root, *reversed(self.units[1:])] if backward else self.units
        place = order.index(unit)
        unit.gather()
        for following in order[place + 1 : place + 1 + self.ahead]:
            if following.awaited or not backward:
                following.gather()
        unit.use_whole()

    def wait_for_gradients(self) -> None:
        for finish in self.reducing:
            finish()
        self.reducing = []

    def reduce_rest(self) -> None:
        """Reduce what a backward pass has left: the root, and blocks whose input wants no gradient. Then nothing is whole on any rank."""
        for unit in self.units:
            if unit.open:
                self.after_backward(unit)
        self.wait_for_gradients()
        for unit in self.units:
            if not self.keeps_always:
                unit.release()

    # The parts of a step.

    def finish(self) -> None:
        """Every backward pass has reduced its gradients; replicas now add their shards."""
        self.reduce_rest()
        self.flats = [flat for unit in self.units for flat in unit.flats if flat.trained]
        partly = [flat.gradient for flat in self.flats if flat.gradient is not None and flat.group is self.mesh.fsdp]
        for work in [self.mesh.replicas.all_reduce(gradient, asynchronous=True) for gradient in partly]:
            work.wait()

    def used(self) -> Tensor:
        return torch.tensor([flag for flat in self.flats for flag in flat.used], dtype=torch.float64)

    def drop_unused(self, users: Sequence[float]) -> None:
        counts = iter(users)
        for flat in self.flats:
            flat.close_step([next(counts) for _ in flat.used])

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        """While it is open, a unit stays gathered once it was used: a forward pass for each token of a generated text gathers once in all."""
        self.keeps_always = True
        try:
            yield
        finally:
            self.keeps_always = False
            self.reduce_rest()

    @property
    def gathered_bytes(self) -> int:
        """Of whole weights that this rank holds at the moment."""
        return sum(unit.gathered_bytes for unit in self.units)


class BeforeIt(torch.autograd.Function):
    """The identity in front of a unit: its backward pass is the last thing of the unit's, and then calls `done`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, done: Callable[[], None]) -> Tensor:
        ctx.done = done
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.done()
        return upstream, None


def compile_each(blocks: Sequence[nn.Module], **options: Any) -> None:
    """In place of a model's `compile`: what blocks compute is compiled, and the gathering around them stays out of it."""
    for block in blocks:
        block.compile(**options)


def autocast_without_cache(device_type: str) -> torch.autocast:
    """Mixed precision as it is, without the cache in which it would keep rounded copies of all units until the end of the forward pass."""
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled=torch.is_autocast_enabled(device_type), cache_enabled=False)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of what a model returns: one, or several in tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def first_value(model: nn.Module, seed: int, name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's numbers of a parameter as the model has it, or as its name and the seed make it where it has no memory yet."""
    return local_initial_value(model.logical_name(name), parameter, model.config, seed) if parameter.is_meta else parameter


def device_of(model: nn.Module, device: torch.device | str) -> torch.device:
    parameter = next(model.parameters())
    return torch.device(device) if parameter.is_meta else parameter.device
