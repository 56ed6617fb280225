"""Chapter 12. Model construction of a run: random or given weights, an adapter, and a frozen copy as reference, in any layout."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shared.model.init import forget_files
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.strategy import ParallelStrategy
from shared.preference.reference import Score, scorer
from shared.totals import Batch
from shared.trainer.axes import RUN_AXES
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import InitialWeights, with_adapter


def plain_model(config: TrainerConfig, mesh: Mesh, device: torch.device, start: InitialWeights | None = None) -> TransformerModel:
    """The model before it is parallelized, with its adapter; where weights will be cut, without memory, because no rank need have room for
    all of them. Tokens that were added have rows that differ where an adapter leaves them frozen."""
    apart = config.adapter is not None
    if mesh.fsdp.size > 1 or mesh.tp.size > 1 or mesh.pp.size > 1 or config.parallel.expert_parallel > 1:
        if start:
            return with_adapter(start.open(config.model, apart), config.adapter, config.seed, config.report.export)
        with torch.device("meta"):
            return TransformerModel(config.model, MIXTURE)
    if start:
        return with_adapter(start.load(config.model, device, apart), config.adapter, config.seed, config.report.export)
    return TransformerModel(config.model, MIXTURE, config.seed).to(device)


def parallel_model(
    config: TrainerConfig,
    mesh: Mesh,
    device: torch.device,
    start: InitialWeights | None,
    shaped: Callable[[TransformerModel], TransformerModel],
    trained: bool = True,
) -> ParallelStrategy:
    """The run's model in its layout. shaped: what the mode changes in the plain model. trained: False for one that stays as it is."""
    dtype = None if config.precision == "float32" else getattr(torch, config.precision)
    model = shaped(plain_model(config, mesh, device, start))
    strategy = apply_parallel(model, mesh, config.optimizer if trained else None, dtype, device, config.seed, RUN_AXES)
    forget_files(strategy.module)
    return strategy


def first_scorer(
    config: TrainerConfig, start: InitialWeights, strategy: ParallelStrategy, score: Callable[[nn.Module, Batch], Tensor]
) -> Score:
    """`score` of the model that the run began with: the trained one without its adapter, or else a frozen copy of the first weights, in the
    same layout and on the same device. Every rank calls it."""
    if config.adapter:
        return scorer(strategy.model, score, without=strategy.module)
    device = next(strategy.module.parameters()).device
    reference = parallel_model(config, strategy.mesh, device, start, lambda model: model.requires_grad_(False), trained=False)
    reference.model.eval()
    return scorer(reference.model, score)
