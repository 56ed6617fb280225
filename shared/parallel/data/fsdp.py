"""Chapter 06. Fully sharded data parallelism (FSDP, ZeRO-3): a unit's weights are gathered for its computation only, then freed.

    forward     gather unit 0, compute, free; gather unit 1, compute, free; ...
    backward    gather the last unit, compute, free, and reduce-scatter its gradients; gather the one before it; ...

A unit is a block; embedding, last norm and head together are the root unit, which stays gathered throughout. Each rank sees its own share
of the batch, and computes what one process would: only storage is sharded (Rajbhandari et al. 2020; Zhao et al. 2023, section 3).

    moved per step, of P parameters:  2 P gathered and P reduced, half as much again as an all-reduce, which is one of each

While a unit computes, the next one is prefetched. Every micro-batch reduces its gradients, so a rank never holds more than a unit of
unsharded gradients; replicas (axis dp, HSDP) add their shards at the last micro-batch only. Under a pipeline m micro-batches would gather
2 m P and reduce m P: with `reshard_after_forward: false` weights and unsharded gradients stay until the step ends, for P and P.

Left out on purpose: units other than a block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared.model.context import AttentionContext
from shared.model.init import local_initial_value
from shared.parallel.data.engine import DataEngine
from shared.parallel.data.flat import FlatParam, Unit, slots_of, slots_within
from shared.parallel.mesh import Mesh
from shared.totals import Batch, Objective, Runner, Totals


class FullySharded(DataEngine):
    """FSDP: shards a model's parameters over `mesh.fsdp`, in place. Between two uses its modules hold this rank's shards.

    Args:
        model: a `TransformerModel`, the same on every rank, with untrained parameters frozen already. One on the meta device may be
            too large for a rank: it is allocated and initialized here, one parameter after the other.
        mesh: `reshard_after_forward`, `pipeline_parallel` and `prefetch` of its configuration are read.
        dtype: the dtype in which blocks are gathered; None for the weights' own. The run then computes under autocast with that dtype,
            which would otherwise round the weights and keep the copies of all blocks until the backward pass. The root unit is gathered in
            its own dtype, so that the residual stream is not rounded. Gradients are added in the weights' own dtype.
        device: where the shards of a model on the meta device are allocated.
        seed: for the initial weights of such a model.

    Attributes:
        model, optim_params: the model. Its `named_parameters` are this rank's shards under the full parameters' names.
        root: the unit of all parameters outside the blocks. units: the root first, then the blocks in the order of the forward pass.
        running: the units of the last forward pass: a pipeline's rank runs one of its chunks at a time.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", seed: int = 0):
        super().__init__(model, mesh.loss)
        self.mesh = mesh
        self.keep_unsharded, self.prefetch = not mesh.config.reshard_after_forward, mesh.config.prefetch
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
        self.running: list[Unit] = []
        self.flats: list[FlatParam] = []
        self.always_unsharded = False
        for stack in stacks:
            stack.run_block = partial(self.run_block, stack.run_block)
        model.compile = partial(compile_each, blocks)
        model.register_forward_pre_hook(self.before_forward)
        model.register_forward_hook(self.after_forward)

    # A forward pass.

    def before_forward(self, model: nn.Module, inputs: tuple) -> None:
        self.reduce_rest()
        self.mesh.fsdp.trace.phase = "forward"
        stacks = [stack for stack in (model.encoder, model.stack) if stack is not None]
        self.running = [self.root, *(self.unit_of[block] for stack in stacks for block in stack.blocks.values())]
        self.use(self.root, self.running)

    def run_block(self, inner: Callable[..., Tensor], block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
        """A `run_block` for FSDP: gather the block's unit, compute (`inner`, possibly with activation checkpointing), free the weights."""
        unit = self.unit_of[block]
        self.use(unit, self.running)
        if torch.is_grad_enabled():
            x = PostBackward.apply(x, partial(self.after_backward, unit))
        with autocast_without_cache(x.device.type):
            x = inner(block, x, context)
        if x.requires_grad and torch.is_grad_enabled():
            unit.awaits_backward = True
            x.register_hook(partial(self.before_backward, unit, self.running))
        if self.always_unsharded:
            unit.put_shards()
        elif not (self.keep_unsharded and unit.awaits_backward):
            unit.release()
        return x

    def after_forward(self, model: nn.Module, inputs: tuple, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        results = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        for tensor in results:
            self.root.awaits_backward = True
            tensor.register_hook(partial(self.before_backward, self.root, self.running))
        if not results:
            self.reduce_rest()

    # A backward pass.

    def before_backward(self, unit: Unit, ran: Sequence[Unit], gradient: Tensor) -> None:
        """A unit's backward pass begins: the gradient of its output has arrived. ran: the units of its forward pass, in order."""
        self.mesh.fsdp.trace.phase = "backward"
        unit.open = True
        self.use(unit, [self.root, *reversed(ran[1:])], backward=True)

    def after_backward(self, unit: Unit) -> None:
        """All gradients of this unit are ready. Wait for the previous unit's reduce-scatter first: at most two units' gradients exist."""
        if self.always_unsharded:
            unit.accumulate()
            unit.put_shards()
            return
        self.wait_for_gradients()
        self.reducing = unit.begin_reduce()

    def use(self, unit: Unit, order: Sequence[Unit], backward: bool = False) -> None:
        """Unshard a unit for its computation, and prefetch the units that come next in the order."""
        place = order.index(unit)
        unit.gather()
        for following in order[place + 1 : place + 1 + self.prefetch]:
            if following.awaits_backward or not backward:
                following.gather()
        unit.use_whole()

    def wait_for_gradients(self) -> None:
        for finish in self.reducing:
            finish()
        self.reducing = []

    def reduce_rest(self) -> None:
        """Reduce the rest after a backward pass: the root, and blocks whose input needs no gradient. Afterwards all weights are sharded."""
        for unit in self.units:
            if unit.open:
                self.after_backward(unit)
        self.wait_for_gradients()
        for unit in self.units:
            if not self.always_unsharded:
                unit.release()

    # The parts of a step.

    def runner(self, runner: Runner) -> Runner:
        """Reshard all weights before each micro-batch; under a pipeline with `reshard_after_forward: false`, after the step only."""

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            def on_shards(model: nn.Module, batch: Batch) -> Totals:
                self.reduce_rest()  # a block whose input needs no gradient, as over a frozen embedding, is still gathered
                return objective(model, batch)

            self.always_unsharded = self.keep_unsharded and self.mesh.pp.size > 1
            try:
                return runner(model, microbatches, on_shards)
            finally:
                self.always_unsharded = False

        return run

    def finish(self) -> None:
        """All-reduce the gradients' shards over the replicas, once every backward pass has reduce-scattered its gradients."""
        self.reduce_rest()
        self.flats = [flat for unit in self.units for flat in unit.flats if flat.trained]
        if self.mesh.replicas.size > 1:
            for flat in self.flats:
                if flat.gradient is None and flat.group is self.mesh.fsdp:  # another replica may have used it
                    flat.add(torch.zeros_like(flat.shard))
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
    def gathering(self, once: bool) -> Iterator[None]:
        """See `DataEngine`."""
        self.always_unsharded = once
        try:
            yield
        finally:
            self.always_unsharded = False
            self.reduce_rest()

    @property
    def whole_bytes(self) -> int:
        return sum(flat.whole.nbytes for unit in self.units for flat in unit.flats)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of unsharded weights on this rank now."""
        return sum(unit.gathered_bytes for unit in self.units)


class PostBackward(torch.autograd.Function):
    """A post-backward hook: the identity in front of a unit, whose backward pass runs last in the unit and calls `done`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, done: Callable[[], None]) -> Tensor:
        ctx.done = done
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.done()
        return upstream, None


def compile_each(blocks: Sequence[nn.Module], **options: Any) -> None:
    """Compile each block instead of the whole model (torch.compile), so that the all-gathers around the blocks stay outside the graph."""
    for block in blocks:
        block.compile(**options)


def autocast_without_cache(device_type: str) -> torch.autocast:
    """The current autocast without its cache, which would keep rounded copies of all units until the forward pass ends."""
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled=torch.is_autocast_enabled(device_type), cache_enabled=False)


def first_value(model: nn.Module, seed: int, name: str, parameter: nn.Parameter) -> Tensor:
    """The initial value of this rank's part of a parameter: the model's own, or drawn from name and seed for one on the meta device."""
    return local_initial_value(model.logical_name(name), parameter, model.config, seed) if parameter.is_meta else parameter


def device_of(model: nn.Module, device: torch.device | str) -> torch.device:
    parameter = next(model.parameters())
    return torch.device(device) if parameter.is_meta else parameter.device
