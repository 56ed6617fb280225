"""Chapter 04. The state of a run: what callbacks may read of it, and what they may ask of it. `RuntimeEngine` is one.

Callbacks are below the engine, which calls them, so they name what they read here and not the engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # all that needs torch, as a tracker whose file is read does not
    import torch
    from rich.console import Console
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shared.totals import Batch, Objective, Totals


class Ranks(Protocol):
    """What callbacks may ask of the processes that train together: a part of `shared.engine.strategy.Strategy`, which says more of each."""

    rank: int
    size: int
    data_size: int
    module: "nn.Module"
    grad_params: "nn.Module"
    measured: "Tensor | None"

    def norms(self, groups: "Mapping[str, Mapping[str, Tensor | None]]") -> "dict[str, Tensor]": ...

    def sum(self, totals: "Totals") -> "Totals": ...

    def gather_stages(self, metrics: Mapping[str, float]) -> dict[str, float]: ...

    def full_weights(self) -> "dict[str, Tensor]": ...


class RunState:
    """The state of a run of the engine.

    Attributes:
        strategy: the processes that train together.
        model, optimizer, objective: what is trained, and on which loss; the model is what objectives call.
        config: how the run is watched, saved and ended (`shared.engine.config.EngineConfig`). output: the run's folder.
        console: where the run speaks. device: where the model is.
        step, steps: how many are done, and how many are wanted.
        began_at, saved_at, evaluated_at: the steps at which this process began, and of the last checkpoint and evaluation; -1 for none.
        microbatches: of the step that runs. timings: seconds by phase of the last step.
        totals: of the step, reduced over ranks; None before the first one. token_count, loss: its valid tokens, and their mean loss.
        grad_norm: of the mean loss's gradient, before clipping; times the loss scale, where there is one.
        validation: totals of the last evaluation; None before the first one.
        log_due: whether the step that runs, or has just run in `on_step`, is one that is logged.
        stopped: why the run ended early; None where it did not. leaving: whether it ends because it was asked to, in any of its processes.
        saver, parts: what writes checkpoints, and name -> whatever else they keep.
    """

    strategy: Ranks
    model: "nn.Module"
    optimizer: "Optimizer"
    objective: "Objective"
    config: Any
    output: Path
    console: "Console"
    device: "torch.device"
    step: int
    steps: int
    began_at: int
    saved_at: int
    evaluated_at: int
    microbatches: "Sequence[Batch]"
    timings: dict[str, float]
    totals: "Totals | None"
    token_count: int
    loss: float
    grad_norm: float
    validation: "Totals | None"
    stopped: str | None
    saver: Any
    parts: dict[str, Any]
    log_due: bool
    leaving: bool

    def stop(self, reason: str) -> None:
        """End the run after this step, saved, with `reason` shown."""
