"""Chapter 06. FSDP on PyTorch's own engine: `fully_shard`, configured to sum gradients instead of averaging them.

Each parameter becomes a `DTensor`, whose local shard is a block of rows, that is, a contiguous range of its elements: a span, as in
this course's own FSDP. The optimizer is built over the pieces, which are views of the same memory, and knows nothing of DTensors.

Left out on purpose: parameters on a mesh of their own, cuts along other dimensions, and moving weights to the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shared.model.init import local_initial_value
from shared.model.sharding import Range, Sharding, make_shard, split_dimension
from shared.parallel.comm.communicator import Communicator
from shared.parallel.data.engine import DataEngine, Parameters
from shared.parallel.data.fsdp import compile_each
from shared.parallel.mesh import Mesh
from shared.parallel.processes.torchrun import all_gather_single, reduce_scatter_single
from shared.totals import Batch, Objective, Runner, Totals, Updater, add_totals


class TorchSharded(DataEngine):
    """FSDP by `fully_shard`: weights, gradients and optimizer state are sharded over `mesh.fsdp`, block by block.

    With several replicas (`mesh.dp`, HSDP) gradient shards are all-reduced over them in the last micro-batch. Within a replica gradients
    are reduce-scattered in every micro-batch, so that no rank ever holds unsharded gradients of more than a block.

    Args:
        model: on its device, the same on every rank. It is sharded in place.
        mesh: `reshard_after_forward` and `prefetch` of its configuration are read; with `prefetch` 0 PyTorch chooses.
        dtype: the dtype in which blocks are gathered, that of autocast; None for the weights' own, in which embedding, head and gradients
            always are.
        device, seed: of a model on the meta device, whose shards are allocated and initialized here.

    Attributes:
        optim_params: this rank's shards, each a view of the memory that `fully_shard` keeps it in.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", seed: int = 0):
        super().__init__(model, mesh.data)
        is_meta = next(model.parameters()).is_meta
        self.replicas = mesh.dp.size
        outer = {name: parameter for name, parameter in model.named_parameters()}  # with their facts, which `fully_shard` does not keep
        device_mesh = device_mesh_of(mesh, torch.device(device) if is_meta else next(model.parameters()).device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=next(model.parameters()).dtype, cast_forward_inputs=False)
        blocks = [block for stack in (model.encoder, model.stack) if stack is not None for block in stack.blocks.values()]
        exact = [module for block in blocks for module in block.modules() if dtype and stays_exact(module)]  # units of their own
        self.units, self.reshards = [*exact, *blocks, model], mesh.config.reshard_after_forward
        for unit in self.units:
            mixed = {"mp_policy": policy} if unit in blocks else {}
            fully_shard(unit, mesh=device_mesh, reshard_after_forward=mesh.config.reshard_after_forward, **mixed)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # a factor of 1 is otherwise a multiplication that gloo does not know
            unit.set_custom_all_gather(NotedAllGather(mesh.fsdp))
            unit.set_custom_reduce_scatter(NotedReduceScatter(mesh.fsdp))
        if hasattr(model, "set_reduce_scatter_unused_params"):  # from torch 2.13 on; before, ranks that use different parameters hang
            model.set_reduce_scatter_unused_params(True)
        model.compile = partial(compile_each, blocks)
        fetch_ahead(blocks, mesh.config.prefetch)
        if is_meta:
            model.to_empty(device=device)
            model.tie_weights()
        self.whole = dict(model.named_parameters())
        rounded = {id(each) for block in blocks for each in block.parameters()} if dtype else set()
        rounded -= {id(each) for module in exact for each in module.parameters()}
        widths = [dtype.itemsize if id(each) in rounded else each.element_size() for each in self.whole.values()]
        self.gathered = sum(width * each.numel() for width, each in zip(widths, self.whole.values(), strict=True))
        shardings = {name: sharding_by_torch(name, parameter, mesh.fsdp, outer[name]) for name, parameter in self.whole.items()}
        shards = {name: make_shard(local(parameter), shardings[name], outer[name]) for name, parameter in self.whole.items()}
        for name, parameter in self.whole.items():
            parameter.sharding = shardings[name]
        for name, parameter in self.whole.items() if is_meta else ():
            local(parameter).copy_(local_initial_value(model.logical_name(name), outer[name], model.config, seed, shardings[name]))
        self.optim_params, self.stored = Parameters(shards), shards
        self.watched = UsedParameters(model)

    def runner(self, runner: Runner) -> Runner:
        """All-reduce over the replicas in the last micro-batch only."""
        if self.replicas == 1:
            return runner

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            *early, last = microbatches
            self.model.set_requires_all_reduce(False)
            parts = [runner(model, early, objective)] if early else []
            self.model.set_requires_all_reduce(True)
            return add_totals([*parts, runner(model, [last], objective)])

        return run

    def used(self) -> Tensor:
        return self.watched.take()

    def drop_unused(self, users: Sequence[float]) -> None:
        """Move each gradient to the shard that the optimizer holds; a parameter that no rank used gets none."""
        for parameter, shard, anywhere in zip(self.whole.values(), self.optim_params.parameters(), users, strict=True):
            gradient, parameter.grad = parameter.grad, None
            owned = [part for part in shard.sharding.parts if part.sizes == tuple(shard.sharding.outer_shape)]  # one rank has all of it
            if gradient is not None and anywhere and (shard.numel() or not owned):
                shard.grad = local(gradient)

    def updater(self, updater: Updater) -> Updater:
        """Reshard units that were gathered without a backward pass: the next forward pass would take them for the new weights."""

        def update(model: nn.Module, optimizer: torch.optim.Optimizer, token_count: Tensor) -> None:
            for unit in self.units:
                unit.reshard()
            updater(self.optim_params, optimizer, token_count)

        return update

    @contextmanager
    def gathering(self, once: bool) -> Iterator[None]:
        """See `DataEngine`."""
        for unit in self.units:
            unit.set_reshard_after_forward(not once)
        try:
            yield
        finally:
            for unit in self.units:
                unit.set_reshard_after_forward(self.reshards)
                unit.reshard()

    @property
    def whole_bytes(self) -> int:
        return self.gathered


def device_mesh_of(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """PyTorch's device mesh over existing groups: fsdp, or dp x fsdp."""
    if mesh.dp.size == 1:
        return DeviceMesh.from_group(mesh.fsdp.torch_group, device.type, mesh_dim_names=("fsdp",))
    grid = torch.tensor(mesh.data.members).view(mesh.dp.size, mesh.fsdp.size)
    groups = [mesh.dp.torch_group, mesh.fsdp.torch_group]
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=("dp", "fsdp"))


def fetch_ahead(units: Sequence[FSDPModule], ahead: int) -> None:
    """Prefetch the next `ahead` units while a unit computes, in the forward and in the backward pass."""
    for index, unit in enumerate(units) if ahead else ():
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(units[max(index - ahead, 0) : index][::-1]))


def stays_exact(module: nn.Module) -> bool:
    """Whether a module has parameters that must not be gathered in 16 bits, such as a router's."""
    return any(getattr(parameter, "full_precision", False) for parameter in module.parameters(recurse=False))


def local(tensor: DTensor) -> Tensor:
    """This rank's shard of a parameter or gradient, in the engine's own memory."""
    return tensor.detach().to_local()


def sharding_by_torch(name: str, parameter: DTensor, group: Communicator, outer: nn.Parameter) -> Sharding:
    """The sharding of a parameter by `fully_shard`, in chunks of rows. outer: the parameter before, perhaps a shard itself."""
    if [placement for placement in parameter.placements if not placement.is_replicate()] != [Shard(0)]:
        raise ValueError(
            f"{name} has the placements {parameter.placements}, of which no rank holds one box: shard it by tensor parallelism on plain "
            "local tensors first, or use parallel.backend: course."
        )
    return split_dimension(outer, 0, chunk_ranges(outer.shape[0], group.size), group)


def chunk_ranges(size: int, ranks: int) -> list[Range]:
    """The slices of a dimension by `torch.chunk`: of equal length as far as it reaches, so later ranks may have less, or nothing."""
    share = -(-size // ranks)
    return [(min(rank * share, size), min((rank + 1) * share, size)) for rank in range(ranks)]


class UsedParameters:
    """Flags of the parameters that a step has used on this rank. `fully_shard` gives an unused parameter a gradient of zeros, with which an
    optimizer would apply weight decay."""

    def __init__(self, model: nn.Module):
        names = [name for name, _ in model.named_parameters()]
        self.model, self.flags = model, dict.fromkeys(names, False)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.handles = {unit: unit.register_forward_pre_hook(self.watch) for unit in units}

    def watch(self, unit: FSDPModule, inputs: tuple) -> None:
        """Register hooks on the unsharded parameters, which exist from the unit's first use."""
        self.handles.pop(unit).remove()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and not hasattr(parameter, "watched"):
                parameter.watched = True
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.flags.update({name: True}))

    def take(self) -> Tensor:
        """[parameters] float64, 1 for each that was used since the last call, in the order of `named_parameters`."""
        flags = torch.tensor(list(self.flags.values()), dtype=torch.float64)
        self.flags = dict.fromkeys(self.flags, False)
        return flags


class Noted:
    """A custom collective for `fully_shard`, which records it in the communication trace."""

    def __init__(self, group: Communicator):
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, operation: str, whole: Tensor, start: Callable[[], dist.Work]) -> None:
        self.group.dispatch(operation, whole, lambda: start().wait, asynchronous=False)


class NotedAllGather(Noted):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        start = lambda: all_gather_single(output_tensor, input_tensor, group=group, async_op=True)  # noqa: E731
        self.note("all_gather", output_tensor, start)


class NotedReduceScatter(Noted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op: bool = False
    ) -> None:
        start = lambda: reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=True)  # noqa: E731
        self.note("reduce_scatter", input_tensor, start)
