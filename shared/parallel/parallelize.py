"""Chapter 06. Parallelize: the one function that applies parallelism to a plain model, from outside the model, in a fixed order.

    axes in their order (activation checkpointing; later pipeline, tensor, experts)  ->  weights, on the device
        ->  data engines (FSDP, ZeRO, DDP)  ->  engines around the optimizer's step (offload)

Each axis is a file of its own: it changes the plain model in place and sets attributes of its parameters (`shared.model.sharding`).
Activation checkpointing comes first, because the engines that shard weights wrap around it: a block that is computed again in the backward
pass must find its weights gathered. The model knows nothing of all this, and neither do objective, optimizer and updater.

Left out on purpose: the axes that chapters 07 to 09 add. They are passed in as arguments, so that this file does not change.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from shared.course.errors import SettingError
from shared.model.block import Block
from shared.model.init import materialize
from shared.optim.config import OptimizerConfig
from shared.optim.routing import Route, route
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig, require_built
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.data.ddp import DataParallel
from shared.parallel.data.engine import DataEngine, Parameters
from shared.parallel.data.fsdp import FullySharded, compile_each
from shared.parallel.data.zero import Zero, muon_matrices
from shared.parallel.health.agreement import require_agreement
from shared.parallel.health.replicas import fingerprints
from shared.parallel.mesh import Axis, Mesh
from shared.parallel.strategy import ParallelStrategy


class ActivationCheckpointing(Axis):
    """Activation checkpointing as an axis: blocks whose activations are recomputed."""

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        by_torch = mesh.config.backend == "torch" and mesh.world.size > 1
        apply_activation_checkpointing(model, mesh.config.activation_checkpointing, "torch" if by_torch else "course")


AXES: tuple[Axis, ...] = (ActivationCheckpointing(),)  # of this floor


def apply_parallel(
    model: nn.Module,
    mesh: Mesh,
    optimizer: OptimizerConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    axes: Sequence[Axis] = AXES,
) -> ParallelStrategy:
    """Parallelize a model as `mesh.config` says. It is changed in place: use what is returned.

    Args:
        model: a `TransformerModel` on its device, with the same weights on every rank. What is not to be trained is frozen already.
        mesh: this rank's.
        optimizer: what will be built over the result; None for one that treats each number alone, or for a model that is not trained.
        dtype: the autocast dtype of the run (bfloat16, float16), in which sharded weights are gathered; None for float32.
        device, seed: of a model on the meta device, which gets its memory and its initial weights here; where weights are sharded, no rank
            ever has more of it than its shards and one parameter.
        axes: in the order in which they shape the model: activation checkpointing, pipeline, tensor and sequence, experts.

    Raises:
        RanksDisagree: the ranks' models differ, or what is to be done with them.
        ValueError: what was asked for cannot take effect on this model, or no axis brings it.
    """
    require_built(mesh.config, [name for axis in axes for name in axis.brings])
    require_sensible(model, mesh, trained=optimizer is not None)
    require_agreement(mesh.world, "model", {"optimizer": optimizer, "dtype": dtype, "seed": seed, "weights": fingerprints(model)})
    routes = routes_of(model, optimizer)
    for axis in axes:
        axis.shape(model, mesh)
    if mesh.fsdp.size == 1 and next(model.parameters()).is_meta:
        materialize(model, device, seed)
    whole = muon_matrices(routes) if mesh.config.zero else set()
    engines = data_engines(model, mesh, whole, dtype, device, seed) if mesh.world.size > 1 else []
    around = [engine for axis in axes if (engine := axis.engine(model, mesh))]
    offload = "cpu" if mesh.config.offload_optimizer else None
    strategy = ParallelStrategy(model, mesh, [*around, *engines], routes, offload=offload)
    require_effect(strategy)
    return strategy


def routes_of(model: nn.Module, optimizer: OptimizerConfig | None) -> list[Route] | None:
    """The update rule of each parameter, decided on the whole model: a rank's part may lack what a pattern names."""
    return route(model, optimizer.name, no_decay=optimizer.no_decay, to_adamw=optimizer.to_adamw) if optimizer else None


def data_engines(
    model: nn.Module, mesh: Mesh, whole: set[str], dtype: torch.dtype | None, device: torch.device | str, seed: int
) -> list[DataEngine]:
    """Make the data-parallel engines (DDP, ZeRO or FSDP): one for all parameters, or for replicas one for each group of ranks."""
    config = mesh.config
    by_torch = config.backend == "torch" and (mesh.pp.size == 1 or config.fully_sharded > 1)  # DDP's hooks know no schedule
    if by_torch and mesh.loss.size == 1:  # tensor-parallel ranks alone: nothing to shard
        return []
    if config.fully_sharded > 1:
        return [(torch_sharded if by_torch else FullySharded)(model, mesh, dtype, device, seed)]
    if mesh.loss.size > 1:  # compiled as a whole, the model's gradients would all come at the end, and no bucket beside the backward pass
        model.compile = partial(compile_each, [module for module in model.modules() if isinstance(module, Block)])
    groups: dict[Communicator, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(getattr(parameter, "shared_over", mesh.loss), {})[name] = parameter
    engines: list[DataEngine] = []
    for group, named in groups.items():
        part = model if len(groups) == 1 else Parameters(named)
        if by_torch and group is mesh.loss:
            engines.append(torch_replicas(model, mesh, part, whole))
        elif config.zero:
            engines.append(Zero(part, group, config.zero, whole, config.bucket_megabytes, alone=len(groups) == 1))
        else:
            engines.append(DataParallel(part, group, config.bucket_megabytes) if group.size > 1 else DataEngine(part, group))
    return engines


def torch_replicas(model: nn.Module, mesh: Mesh, part: nn.Module, whole: set[str]) -> DataEngine:
    """PyTorch's own engine of replicas, which takes seconds to import."""
    from shared.parallel.data.replicas_on_torch import TorchReplicas, TorchZero

    return TorchZero(model, mesh, part, whole) if mesh.config.zero else TorchReplicas(model, mesh, part)


def torch_sharded(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None, device: torch.device | str, seed: int) -> DataEngine:
    """PyTorch's own engine of shards, which takes seconds to import."""
    from shared.parallel.data.shards_on_torch import TorchSharded

    for name, parameter in model.named_parameters():
        if hasattr(parameter, "shared_over"):
            raise ValueError(f"parallel.backend torch adds every gradient over all data ranks, and {name} has others: use backend course.")
    return TorchSharded(model, mesh, dtype, device, seed)


def require_sensible(model: nn.Module, mesh: Mesh, trained: bool) -> None:
    """Refuse a model that cannot be parallelized as asked."""
    if trained and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("The model has no trainable parameter: there is nothing for an optimizer. Give optimizer=None for a frozen model.")
    config: ParallelConfig = mesh.config
    asked = {"fully_sharded": mesh.fsdp.size > 1, "activation_checkpointing": config.activation_checkpointing != "none"}
    needs_blocks = [name for name, wanted in asked.items() if wanted]
    if needs_blocks and not getattr(getattr(model, "stack", None), "blocks", None):
        raise SettingError(f"parallel.{needs_blocks[0]} works block by block, and {type(model).__name__} has no stack of blocks.")


def require_effect(strategy: ParallelStrategy) -> None:
    """Require that sharding took effect: a setting that wraps nothing would silently train slower or larger than it should."""
    config = strategy.mesh.config
    if not (config.zero or config.fully_sharded > 1):
        return
    held = total = 0
    for name, parameter in strategy.optim_params.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "sharding"):
            raise ValueError(f"{name} was to be sharded over ranks and is whole on each of them.")
        held, total = held + parameter.numel(), total + getattr(parameter, "sharding", parameter).shape.numel()
    if total and held >= total:
        raise ValueError("The parameters were to be sharded over ranks, and this rank holds all of them.")
