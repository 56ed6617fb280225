"""Chapter 04. The distributed strategy: what a run asks of the processes that train together. This base class is the single process.

The engine knows ranks through one object of this class and in no other way: which module objectives call, over which parameters the
optimizer is built, how a step's parts are completed over ranks, the gradient norm, decisions that all ranks must make together, and the
state to save. Chapter 06 derives the strategy of many ranks; a layout overrides a few methods.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.checkpoint.folder import Checkpoints
from shared.engine.checkpoint.saver import Saver
from shared.engine.checkpoint.snapshot import weights_of
from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.folder_lock import FolderLock, held_folder
from shared.totals import Objective, Runner, Totals, Updater


class Strategy:
    """The strategy of a single process, and the base class of every distributed strategy.

    Attributes:
        model: what objectives call.
        module: the plain model inside it, whose names are the logical ones.
        optim_params: a module whose `named_parameters` the optimizer is built over and steps.
        grad_params: the same for the parameters at which gradients are complete after the reducer.
        state: what checkpoints save and restore: a module whose `state_dict` has this rank's weights and whose `named_parameters` are
            `optim_params`, all under logical names.
        rank, size: this process's rank, and the world size.
        data_size: how many shares of a batch there are, of which this process reads one.
        holds_everything: whether this rank has all of every parameter.
    """

    holds_everything = True
    rank = 0
    size = data_size = 1

    def __init__(self, model: nn.Module):
        self.model = self.module = self.optim_params = self.grad_params = self.state = model
        self.measured: Tensor | None = None

    def begin(self, engine: Any) -> None:
        """Called by `fit` before anything is restored: compares what the processes were given."""

    # The parts of a step, as `shared.loop.train_step` takes them.

    def objective(self, objective: Objective) -> Objective:
        """Wrap the objective, so that it works on what this rank computes of a batch; in evaluations as well."""
        return objective

    def runner(self, runner: Runner) -> Runner:
        """Wrap the runner, so that gradients are exchanged over the ranks as they become complete."""
        return runner

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        """Reduce the step's totals and gradients (of the loss sum) over all ranks."""
        self.measured = None
        return totals

    def updater(self, updater: Updater) -> Updater:
        """Wrap the updater, so that it steps `optim_params`; afterwards `model` has the new weights on every rank."""
        return updater

    # Norms.

    def grad_norm(self, model: nn.Module | None = None) -> Tensor:
        """The global gradient norm, [] float, the same on every rank. Every rank calls it. It is measured once a step, between reducer and
        updater, and kept for clipping, anomaly detection and logging."""
        if self.measured is None:
            self.measured = self.norms({"all": {name: p.grad for name, p in self.grad_params.named_parameters()}})["all"]
        return self.measured

    def norms(self, groups: Mapping[str, Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """The norm of each group of tensors, [] float, every number of the whole model counted once. Every rank calls it.

        Args:
            groups: key -> name of a parameter of `grad_params` -> a tensor that is sharded as that is. The same keys on all ranks.

        Returns:
            The norms of the groups that any rank has a tensor of.
        """
        return {key: global_gradient_norm(named.values()) for key, named in groups.items() if named}

    # What all ranks decide together.

    def agree(self, reason: str | None) -> str | None:
        """Agree on a shutdown: returns the first reason to stop that any rank has. Every rank calls it at the same step."""
        return reason

    def leads(self, folder: Path) -> bool:
        """Whether this rank is the first of those that see this folder. Every rank calls it."""
        return True

    @contextmanager
    def locked(self, folder: Path, console: Console) -> Iterator[FolderLock]:
        """Lock the run's folder within a `with` block: one rank holds it for all that share it. Every rank calls it.

        Raises:
            CourseError: on all ranks: another run is in the folder, or it cannot be written to.
        """
        leads, problem = self.leads(folder), None
        with ExitStack() as held:
            try:
                lock = held.enter_context(held_folder(folder, leads, console))
            except CourseError as error:
                problem = str(error)
            if problem := self.agree(problem):
                raise CourseError(problem)
            yield lock

    def sum(self, totals: Totals) -> Totals:
        """Sum the totals of an evaluation over all ranks."""
        return totals

    def gather_stages(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of all pipeline stages, each with its own layers, on every rank. Every rank calls it."""
        return dict(metrics)

    # State.

    def full_weights(self) -> dict[str, Tensor]:
        """Gather all weights by logical name, unsharded, on rank 0; empty on the others. Every rank calls it."""
        return weights_of(self.module, everything=True)

    def saver(self, folder: Path, keep_last: int = 2, keep_best: bool = True, asynchronous: bool = True) -> Saver:
        """Make the checkpointer, which saves and restores the run in `folder`."""
        return Saver(self.state, Checkpoints(folder, keep_last, keep_best), asynchronous)

    def callbacks(self) -> Sequence[Callback]:
        """The strategy's own callbacks, which come before all others."""
        return ()

    def gathering(self, once: bool = True) -> AbstractContextManager:
        """A context for generation, which runs the model once for each token: sharded weights stay gathered, or (`once` false) are freed
        after each use."""
        return nullcontext()
