"""Chapter 06. The one function that spreads a plain model over ranks, from outside and in one order.

    recompute blocks  ->  cut weights (fsdp)  ->  replicas (dp, with ZeRO or without)  ->  optimizer on the CPU

Blocks that are computed again come first, because what cuts the weights wraps around them: a block that is computed again in the backward
pass must find its weights gathered. The model knows nothing of all this, and neither do objective, optimizer and updater.

Left out on purpose: the other axes, which chapters 07 to 09 add.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from shared.model.init import materialize
from shared.optim.clipping import model_gradient_norm
from shared.optim.config import OptimizerConfig
from shared.parallel.data.ddp import DataParallel
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh
from shared.parallel.data.offload import offload_optimizer
from shared.parallel.sharding import Cut
from shared.parallel.data.activation_checkpointing import apply_recompute
from shared.parallel.data.zero import Zero, muon_matrices
from shared.totals import Runner, Totals, Updater


class Parallel(Protocol):
    """A model that is spread over ranks, and the parts of its training step.

    model: what objectives call. optimized: whose named parameters the optimizer is built over: the model, or this rank's pieces of it.
    """

    model: nn.Module
    optimized: nn.Module

    def runner(self, runner: Runner) -> Runner:
        """The runner that also sees to it that gradients are exchanged when they are complete."""

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        """Complete the exchange: afterwards the gradients of `optimized` are of the loss sum over all ranks, and the totals too."""

    def updater(self, updater: Updater) -> Updater:
        """The updater, called with `optimized`; afterwards `model` computes with the new weights on every rank."""

    def norm(self, model: nn.Module) -> Tensor:
        """The length of the whole gradient, the same number on every rank, all of which call it."""

    def cuts(self) -> dict[str, Cut]:
        """Where the numbers of a parameter's optimizer state are, and of its weights where those are cut; those held whole are absent."""


class Alone:
    """A model on one rank: nothing is exchanged."""

    def __init__(self, model: nn.Module):
        self.model = self.optimized = model

    def runner(self, runner: Runner) -> Runner:
        return runner

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        return totals

    def updater(self, updater: Updater) -> Updater:
        return updater

    def norm(self, model: nn.Module) -> Tensor:
        return model_gradient_norm(model)

    def cuts(self) -> dict[str, Cut]:
        return {}


def apply_parallel(
    model: nn.Module,
    mesh: Mesh,
    optimizer: OptimizerConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Parallel:
    """Spread a model as `mesh.config` says. It is changed in place: use what is returned.

    Args:
        model: a `TransformerModel` on its device, with the same weights on every rank. What is not to be trained is frozen already.
        mesh: this rank's.
        optimizer: what will be built over the result; ZeRO leaves whole what it must not have in parts. None for one that treats each
            number alone.
        dtype: what the run computes in under autocast (bfloat16, float16), so that blocks of cut weights travel in it; None for float32.
        device, seed: of a model on the meta device, which gets its memory and its initial weights here; where weights are cut, no rank ever
            has more of it than its pieces and one parameter.

    Raises:
        ValueError: what was asked for cannot take effect on this model.
    """
    config, by_torch = mesh.config, mesh.config.backend == "torch" and mesh.world.size > 1
    require_sensible(model, mesh)
    if config.recompute != "none":
        recompute(model, mesh, by_torch)
    if mesh.config.fully_sharded == 1 and next(model.parameters()).is_meta:
        materialize(model, device, seed)
    parallel = Alone(model) if mesh.world.size == 1 else spread(model, mesh, optimizer, dtype, device, seed)
    return offload_optimizer(parallel) if config.offload_optimizer else parallel


def spread(
    model: nn.Module, mesh: Mesh, optimizer: OptimizerConfig | None, dtype: torch.dtype | None, device: torch.device | str, seed: int
) -> Parallel:
    """The model over several ranks."""
    config = mesh.config
    whole = muon_matrices(model, optimizer) if optimizer is not None and config.zero else set()
    if config.backend == "torch":
        parallel = spread_by_torch(model, mesh, whole, dtype, device, seed)
    elif config.fully_sharded > 1:
        parallel = FullySharded(model, mesh, dtype, device, seed)
    elif config.zero:
        parallel = Zero(model, mesh.data, config.zero, whole, config.bucket_megabytes)
    else:
        parallel = DataParallel(model, mesh.data, config.bucket_megabytes)
    require_effect(parallel, mesh)
    return parallel


def spread_by_torch(
    model: nn.Module, mesh: Mesh, whole: set[str], dtype: torch.dtype | None, device: torch.device | str, seed: int
) -> Parallel:
    """PyTorch's engines, which take seconds to import."""
    from shared.parallel.torch_backend.ddp import TorchReplicas, TorchZero
    from shared.parallel.torch_backend.fsdp import TorchSharded

    if mesh.config.fully_sharded > 1:
        return TorchSharded(model, mesh, dtype, device, seed)
    return TorchZero(model, mesh, whole) if mesh.config.zero else TorchReplicas(model, mesh)


def recompute(model: nn.Module, mesh: Mesh, by_torch: bool) -> None:
    if by_torch:
        from shared.parallel.torch_backend.ddp import recompute_blocks as apply
    else:
        apply = apply_recompute
    before = model.stack.run_block
    apply(model, mesh.config.recompute)
    if model.stack.run_block is before:
        raise ValueError(f"parallel.recompute is {mesh.config.recompute} and the model's blocks run as before: it was applied already.")


def require_sensible(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model of which nothing can be spread."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("The model has no trainable parameter: there is nothing to spread over ranks.")
    needs_blocks = [
        name for name, wanted in (("fully_sharded", mesh.fsdp.size > 1), ("recompute", mesh.config.recompute != "none")) if wanted
    ]
    if needs_blocks and not getattr(getattr(model, "stack", None), "blocks", None):
        raise ValueError(f"parallel.{needs_blocks[0]} works block by block, and {type(model).__name__} has no stack of blocks.")


def require_effect(parallel: Parallel, mesh: Mesh) -> None:
    """What was asked for must have happened: a switch that wraps nothing trains on, slower or larger than it should, without a word."""
    cuts = parallel.cuts()
    shared_out = {name for name, parameter in parallel.optimized.named_parameters() if parameter.requires_grad}
    asked = mesh.config.zero or mesh.config.fully_sharded > 1
    if asked and shared_out - set(cuts):
        raise ValueError(f"{min(shared_out - set(cuts))} was to be cut over ranks and is whole on each of them.")
    held = sum(stop - start for cut in cuts.values() for start, stop in [cut.here])
    if asked and held >= sum(cut.shape.numel() for cut in cuts.values()):
        raise ValueError("The parameters were to be cut over ranks, and this rank holds all of them.")
